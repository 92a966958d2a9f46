"""What the private APIs of torch that mstpass uses do: a check for a probe, of the same name."""
