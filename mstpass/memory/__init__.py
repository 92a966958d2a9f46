"""The memory of a step: simulated from plain ops, from graphs and from plans, or read off Inductor.

All simulations end in simulate_ops.py, which makes a ``Timeline``::

    a plan of the partition problem   program.py         -> ops of forward and backward, in order
                                      simulate_plan.py   -> their memory and time
    forward and backward graphs       simulate_graph.py  -> ops of forward and backward
    the body of a loop                simulate_graph.py  -> ops, fused by kernel_rules.py

inductor_schedule.py reads the peak off Inductor's schedule of the compiled graphs instead.
"""
