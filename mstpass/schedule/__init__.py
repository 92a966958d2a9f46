"""The order of finished forward and backward graphs: when recomputation and scatters run."""
