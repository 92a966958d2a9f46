"""The memory of a step: simulated from plain ops, from graphs and from plans, or read off Inductor.

plan   (simulate_plan.py)   -> ops of forward and backward -+
graphs (simulate_graph.py)  -> ops of forward and backward -+-> simulate_ops.py -> timeline.py
Inductor's scheduler (inductor_schedule.py)                    its own timeline, as compiled
"""
