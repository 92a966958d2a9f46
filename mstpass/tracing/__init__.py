"""A user's step traced on fake tensors into joint graphs, and names for its parts."""
