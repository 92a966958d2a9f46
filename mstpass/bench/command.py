"""Runs a benchmark's command: parse the arguments, measure, show, write the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstpass.bench import output
from mstpass.bench.arguments import Arguments, parse
from mstpass.bench.tables import Result
from mstpass.errors import require


class Progress:
    """A progress bar of ``total`` steps on a terminal. It shows nothing elsewhere."""

    def __init__(self, title: str, total: int):
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[what]}"),
        )
        self._bar = progress.Progress(*columns, transient=True)
        self._task = self._bar.add_task(title, total=total, what="")

    def __enter__(self) -> Callable[[str], None]:
        self._bar.start()
        return lambda what: self._bar.update(self._task, advance=1, what=what)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def main(
    name: str,
    runs: Sequence[Callable[[Arguments], Result]],
    argv: Sequence[str],
    *,
    description: str,
    examples: str,
    extra: Sequence[str] = (),
) -> int:
    """Run ``mstpass bench NAME``: each of ``runs``, one after the other.

    ``extra`` names the options that not every benchmark has. The exit status is 0 even if a target
    is missed or a contender fails: the tables show both.
    """
    arguments = parse(name, argv, description, examples, extra)
    require(("rich",), "bench", f"mstpass bench {name}")
    results: list[Result] = []
    for run in runs:
        results.append(run(arguments))
        output.show(results[-1], arguments.device)
        if arguments.markdown is not None:
            output.write_markdown(arguments.markdown, results[-1], arguments)
        if arguments.json is not None:
            output.write_json(arguments.json, results, arguments)
    return 0
