"""What a step needs of memory: simulated from plain ops, from graphs, and read off Inductor."""
