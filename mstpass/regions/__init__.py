"""Find regions: the token-parallel nodes around a wide matmul that a loop over chunks can run.

detect.py        all regions of a graph, and what was refused; calls the others in this order:
anchors.py       the matmuls that widen, from which regions grow
grow.py          a region while it grows: its members and their token dims
close_fused.py   complete a region whose backward can run in the forward
absorb.py        add users that reduce what leaves a region
make_region.py   the finished region as plain data, and the last checks
advice.py        what a user can do about a refusal
"""
