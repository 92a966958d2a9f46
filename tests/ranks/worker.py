"""One rank of a test: runs the named cases in turn and prints what it found as a line of JSON.

torchrun --nproc-per-node 2 tests/ranks/worker.py "tensor parallel" "sharded head"
"""

from __future__ import annotations

import json
import sys
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.checks import op_by_op
from tests.ranks.parallel_cases import CASES


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in names:
        try:
            with op_by_op():
                found = CASES[name](mesh)
        except Exception:
            found = {"raised": traceback.format_exc()}
        torch.compiler.reset()
        line = json.dumps({"case": name, "rank": dist.get_rank(), **found})
        sys.stdout.write(f"\nFOUND {line}\n")
        sys.stdout.flush()
        if "raised" in found:  # the other rank may wait for this one
            raise SystemExit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
