"""`mstpass bench gpu`: everything that is measured on a GPU, in one command.

The command itself (command.py) touches no CUDA device: workers do (worker.py), one process for each
case. It keeps each finished row in a state file (state.py), from which results.py makes JSON,
Markdown and the README's table.
"""

from __future__ import annotations

from mstpass.bench.gpu.command import main

__all__ = ["main"]
