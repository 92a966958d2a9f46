"""Every private API of torch that mstpass uses: one file each, versions checked, with a probe."""
