"""The body of a loop: a region's nodes at chunk size, and the passes that make it lean."""
