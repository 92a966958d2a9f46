"""The partition problem as plain data: values, loops, modes and plans. It needs no torch."""
