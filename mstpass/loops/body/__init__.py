"""The body of a loop: a region's nodes at chunk size, and rewrites that keep its buffers few."""
