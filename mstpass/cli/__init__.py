"""The `mstpass` command."""
