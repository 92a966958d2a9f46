"""Benchmarks: each measures several contenders in one run, and compares figures with targets.

The file of `mstpass bench NAME` is NAME.py, whose ``main`` is a `Benchmark`. The harness: what a
benchmark is (harness.py), the comparison of contenders (comparison.py), work in new processes
(processes.py), and figures and outcome as tables, files and pictures (results.py, plots.py).
Workloads are in models.py and huggingface.py. `mstpass bench gpu` is the package gpu/: its calls go
on where earlier ones have ended.
"""
