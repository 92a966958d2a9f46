"""Find regions: the token-parallel nodes around a wide matmul that a loop over chunks can run, and
attention, which is parallel over heads.

detect.py        all regions of a graph, as plain data, and what was refused; calls the others in
                 this order:
anchors.py       the matmuls that widen, from which regions grow
grow.py          a region while it grows, along any axis: its members and their specs
wide_growth.py   what belongs to a region of tokens or features: all that touches wide values
close_fused.py   complete a region whose backward can run in the forward
absorb.py        add users that reduce what leaves a region
attention.py     attention that a loop over groups of heads, or over rows of queries, can run:
  head_growth.py   what is computed head by head with it
blocks.py        attention in rows of queries, with the MLP behind it
"""
