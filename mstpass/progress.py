"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

T = TypeVar("T")


def progress_bar(*columns: ProgressColumn | str, transient: bool = False) -> Progress:
    """A bar that works without a terminal too, and shows nothing then."""
    # rich is optional
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=transient, disable=hidden)


def counted(items: Sequence[T], text: str) -> Iterator[T]:
    """The items; a bar shows how many of them have been taken."""
    try:
        from rich.progress import MofNCompleteColumn  # rich is optional

        bar = progress_bar(text, MofNCompleteColumn())
    except ImportError:
        yield from items
        return
    with bar:
        yield from bar.track(items)
