"""Partitioning: which values cross from forward to backward."""
