"""The command line: ``python -m tests.torch_suite``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.torch_suite.files import FILES
from tests.torch_suite.runner import Runner, read
from tests.torch_suite.sources import DownloadError, test_folder
from tests.torch_suite.table import markdown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("--source", help="a checkout of PyTorch; by default it is downloaded")
    parser.add_argument("--results", type=Path, default=Path("torch-tests.jsonl"))
    parser.add_argument("--file", action="append", default=[], help="only files with this in them")
    parser.add_argument("--most", type=int, help="the most tests of each file")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then; call again to go on")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is known")
    args = parser.parse_args()
    files = [f for f in FILES if not args.file or any(part in f.name for part in args.file)]
    if not args.table:
        until = time.monotonic() + 60 * args.minutes
        try:
            folder = test_folder(args.source)
        except (DownloadError, FileNotFoundError) as error:
            parser.exit(1, f"{error}\n")
        Runner(folder, args.results, args.limit, until, args.most).run(files)
    print(markdown(files, read(args.results)))


if __name__ == "__main__":
    main()
