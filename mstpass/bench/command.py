"""The command of a benchmark: parses its arguments, measures, shows, and writes the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Command:
    """``mstpass bench NAME``: parse the arguments, run, show, and write the files.

    The exit status is 0 even if a target is missed or a contender fails: the tables show both.

    Attributes:
        runs: functions that measure, called one after the other.
        extra: names of the options that not every benchmark has.
    """

    name: str
    runs: Sequence[Callable[[Arguments], Result]]
    description: str
    examples: str
    extra: Sequence[str] = ()

    def __call__(self, argv: Sequence[str] = ()) -> int:
        arguments = parse(self.name, argv, self.description, self.examples, self.extra)
        require(("rich",), "bench", f"mstpass bench {self.name}")
        results: list[Result] = []
        for run in self.runs:
            results.append(run(arguments))
            output.show(results[-1], arguments.device)
            if arguments.markdown is not None:
                output.write_markdown(arguments.markdown, results[-1], arguments)
            if arguments.json is not None:
                output.write_json(arguments.json, results, arguments)
        return 0
