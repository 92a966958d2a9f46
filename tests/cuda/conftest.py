from __future__ import annotations

import pytest

from tests.cuda.pretended_triton import has_triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that compile for a GPU are skipped where that cannot be done."""
    if has_triton():
        return
    skipped = pytest.mark.skip(reason="triton is not installed: `make test-cuda` installs it")
    for item in items:
        if item.get_closest_marker("dry_run"):
            item.add_marker(skipped)
