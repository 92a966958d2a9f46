"""The README's Python blocks run as they stand, one after the other, in one namespace."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks():
    text = README.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        first_line = text.count("\n", 0, match.start(1))
        # blank lines in front, so that a traceback shows the README's own line number
        yield "\n" * first_line + match.group(1)


def test_python_blocks_run():
    torch.compiler.reset()
    namespace = {"__name__": "readme"}
    sources = list(blocks())
    assert len(sources) >= 2
    for source in sources:
        exec(compile(source, str(README), "exec"), namespace)


def test_images_and_links_exist():
    targets = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert targets
    missing = [t for t in targets if not (README.parent / t).exists()]
    assert not missing
