"""Partitioning: which values cross from forward to backward, and the split into two graphs.

build_problem.py   the partition problem of a joint graph
solvers/           plans for it: a mode for each region, and the saved values
solve.py           what the user's memory budget means for a solver, and its plan, checked
reconstruct/       saved values that backward can compute from later ones instead
split.py           the forward and the backward graph of a plan; what torch's own partitioner saves,
                   and the graphs that it splits instead
"""
