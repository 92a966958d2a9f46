"""`mstpass bench gpu`: everything that is measured on a GPU, in one command.

The command itself (command.py) touches no CUDA device: there is one process for each row
(runner.py). Each finished row is kept in a state file (state.py), from which results.py makes JSON,
Markdown and the README's table.
"""

from __future__ import annotations

from mstpass.bench.gpu.command import main as main
