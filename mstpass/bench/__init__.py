"""Measured workloads: contenders side by side in one run, against targets that can be missed."""
