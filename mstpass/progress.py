"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def progress_bar(*columns: ProgressColumn | str, transient: bool = False) -> Progress:
    """A bar that works without a terminal too, and shows nothing then."""
    # rich is optional
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=transient, disable=hidden)


@contextlib.contextmanager
def counted(total: int, text: str) -> Iterator[Callable[[], None]]:
    """A bar with a text in front; the function that is yielded counts one."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn  # rich is optional

        bar = progress_bar(text, BarColumn(), MofNCompleteColumn())
    except ImportError:
        yield lambda: None
        return
    with bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
