"""Reading the joint graph: what its values are, where tokens run, what ops cost."""
