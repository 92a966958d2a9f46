"""Passes as data, what must hold before and after each, and the one runner of all of them.

    facts.py    what may hold of a graph, and how it is checked
    runner.py   runs, names, times, verifies and prints each pass

The lists are where the passes are: normalize/__init__.py, pipeline_stages.py, inductor_hooks.py.
"""
