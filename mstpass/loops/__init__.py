"""Run a region as loops over chunks of tokens: what to run, what it costs, and how it is written.

candidate_modes.py   the modes of each region          -> plan_region.py, free_overhead.py
plan_region.py       the loops of a region in a mode   -> region_loops.py, chunk_length.py
mode_costs.py        what each mode costs, for the solver that chooses one
apply_plans.py       the chosen loops in the joint graph -> write_loop.py, body/
lowering.py          each loop as Inductor's ``while_loop`` -> loop_step.py
"""
