"""Trace a user's step on fake tensors into joint graphs, and name its parts."""
