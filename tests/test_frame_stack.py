from __future__ import annotations

import resource
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mstpass.frame_stack import with_deep_stack


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames are not kept in chunks")
def test_calls_at_any_depth_map_no_memory():
    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def most_faults(depth):
        before = faults()
        for _ in range(500):
            int_of("1")
        here = faults() - before
        return max(here, most_faults(depth - 1)) if depth else here

    def int_of(text, a=1, b=2, c=3):
        return int(text)

    assert with_deep_stack(most_faults, 300) < 250
    # Tests themselves have a deep stack; a thread begins with one of its own.
    with ThreadPoolExecutor(1) as pool:
        faults_without = pool.submit(most_faults, 300).result()
    assert faults_without >= 500, "without it, some depth maps a chunk at each call"


def test_arguments_may_have_any_name():
    assert with_deep_stack(lambda function, args: (function, args), function=1, args=2) == (1, 2)
