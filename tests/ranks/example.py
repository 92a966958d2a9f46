"""One rank of an example, without kernels: ``python -m tests.ranks.example examples/a.py``."""

from __future__ import annotations

import runpy
import sys

from tests.checks import op_by_op

if __name__ == "__main__":
    with op_by_op():
        runpy.run_path(sys.argv[1], run_name="__main__")
