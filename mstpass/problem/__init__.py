"""The partition problem as plain data, which needs no PyTorch.

problem.py          ``CutProblem`` and all it consists of, and its answer, ``Plan``
op.py               ``Op``: one node of a step, and the kinds of nodes
apply_modes.py      the problem with a mode chosen for each region
saved_set.py        what backward recomputes and reads for a set of saved values, and whether
                    a plan gives it all it needs
problem_json.py     problems as files
solver_registry.py  names of solvers, and the registration of users' own
"""
