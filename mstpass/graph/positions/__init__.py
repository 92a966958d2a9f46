"""What is known of the values that a graph computes from nothing but positions.

A model computes its attention mask from ``arange``, sizes and constants. Here each such tensor is
known at every position, for every symbolic size, and what is said of a mask is proven:

    positions = Positions(joint)
    positions.value(node)     its ``Pieces``, or ``Unknown`` with the node that stands in the way
    band_of(mask, queries, keys)    the keys that each query may read, as a ``Band``

polynomials.py   integer polynomials in indices and sizes
inequalities.py  whether inequalities of them can hold together
pieces.py        a tensor as polynomials on parts of it
exact.py         which numbers a dtype holds
calls.py         one call of an op
sources.py       ops that make tensors of sizes and numbers
pointwise.py     ops that compute each element by itself
views.py         ops that move elements
sums.py          sums along a dim, any, all
evaluate.py      the values of a graph's nodes
bands.py         masks that are bands around the diagonal
"""

from mstpass.graph.positions.bands import Band, band_of
from mstpass.graph.positions.evaluate import Positions, Unknown
from mstpass.graph.positions.pieces import Pieces

__all__ = ["Band", "Pieces", "Positions", "Unknown", "band_of"]
