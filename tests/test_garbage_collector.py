"""Planning pauses Python's garbage collector, and leaves it as it was."""

from __future__ import annotations

import gc

import pytest

from mstpass.pipeline import collector_paused


def test_on_again_after_an_error() -> None:
    on = []

    @collector_paused()
    def planned() -> None:
        on.append(gc.isenabled())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        planned()
    assert on == [False]
    assert gc.isenabled()


def test_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
