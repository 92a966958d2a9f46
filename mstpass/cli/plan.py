"""``mstpass plan``: the longest sequence that fits on a device, or the cheapest plan of one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

from mstpass.cli.plan_arguments import (
    check_combinations,
    check_picture,
    parser_of_plan,
    request_of,
)
from mstpass.errors import require
from mstpass.planner.request import Report, TrainingPlan
from mstpass.progress import progress_bar

FITS, FAILED, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] = ()) -> int:
    parser = parser_of_plan()
    given = parser.parse_args(argv)
    check_combinations(parser, given)
    require(("transformers",), "hf", "mstpass plan")
    require(("rich",), "viz", "mstpass plan")
    if given.plot is not None:
        require(("matplotlib",), "viz", "mstpass plan --plot")
        check_picture(parser, given.plot)
    # These import transformers and rich, which are optional.
    from mstpass.planner.attention import TargetError
    from mstpass.planner.background import usable_cores
    from mstpass.planner.models import ModelError
    from mstpass.planner.plan import plan
    from mstpass.planner.terminal_table import show
    from mstpass.planner.traced_step import SequenceError

    try:
        request = request_of(given)
        with _progress() as report:
            planned = plan(request, report, processes=usable_cores())
    except (ModelError, SequenceError, TargetError) as error:
        print(f"mstpass plan: {error}", file=sys.stderr)
        return BAD_INPUT
    if given.plot is not None:
        from mstpass.planner.picture import draw

        draw(planned, given.plot)
    if given.json:
        print(_json_text(planned))
    else:
        show(planned)
    return FITS if planned.own.fits else FAILED


def _json_text(planned: TrainingPlan) -> str:
    data = {**dataclasses.asdict(planned), "fits": planned.own.fits}
    for sizes in (data["sizes"], data["sizes"]["frozen"]):
        del sizes["each"]  # a number for each tensor of the model
    return json.dumps(data, indent=1, default=sorted)  # sets


@contextlib.contextmanager
def _progress() -> Iterator[Report]:
    """A line that says what is planned at the moment, which vanishes at the end."""
    # rich is optional
    from rich.progress import SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), "planning", TimeElapsedColumn(), "{task.description}")
    with progress_bar(*columns, transient=True) as line:
        task = line.add_task("", total=None)
        yield lambda what: line.update(task, description=what)
