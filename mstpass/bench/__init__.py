"""Benchmarks: each measures several contenders in one run, and compares figures with targets.

The file of `mstpass bench NAME` is NAME.py. All benchmarks share the command line (command.py,
arguments.py), the comparison of contenders (comparison.py), workloads (models.py,
huggingface_models.py, huggingface_architectures.py), and their output (tables.py, output.py,
plots.py). `mstpass bench gpu` is the package gpu/, because it runs in many processes.
"""
