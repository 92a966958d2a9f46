"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

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
