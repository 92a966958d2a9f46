"""`mstpass plan`: the longest sequence and the cheapest plan on a device, without the device."""
