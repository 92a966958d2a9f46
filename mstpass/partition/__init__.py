"""Partitioning: which values cross from forward to backward, and the split into two graphs.

build_problem.py   the partition problem of a joint graph
solvers/           plans for it: a mode for each region, and the saved values
budget.py          what the user's memory budget means for a solver
reconstruct/       saved values that backward can compute from later ones instead
split.py           the forward and the backward graph of a plan
torch_fallback.py  the graphs that torch's own partitioner splits instead
"""
