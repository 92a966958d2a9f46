"""The rows of the op table, by family; see row.py for what a row says.

row.py          what a row is
elementwise.py  pointwise ops, copies, and values that are made from no tensor
dims.py         views, reductions, ops along a dim, and ops by index
calls.py        products, attention, collectives, random draws, and ops that mix tokens
"""
