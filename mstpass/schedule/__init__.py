"""The order of finished forward and backward graphs: when values are recomputed, and when freed."""
