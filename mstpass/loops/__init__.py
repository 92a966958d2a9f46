"""Run a region as loops over chunks of tokens or heads: what to run, its cost, how it is written.

The files in the order in which a region meets them::

    candidate_modes.py   the modes in which it may run
    plan_region.py       its loops in one mode, and their chunk length
    mode_costs.py        what each mode costs, for the solver that chooses one
    apply_plans.py       the chosen loops as nodes of a new joint graph; body/ builds their bodies
    lowering.py          each loop as Inductor's ``while_loop``
"""
