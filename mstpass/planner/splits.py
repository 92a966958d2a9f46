"""The best way to divide devices among data, shards and sequences, and heads into groups.

R devices share each sequence, so that of N devices N / R groups have sequences of their own. The
weights are sharded over all N, or over those of a node, of which each node then has a replica.

    no length is given   the longest sequence wins: estimated by shallow copies for each R
    a length is given    the most tokens per second that fit win: planned in full for each R

Where ranks exchange heads, they may do so in groups, which takes time and less memory. So of a
given length more groups are tried only where fewer do not fit.

Shards in each node alone exchange less between nodes and hold more. They are tried where a length
is given, with the R that has won.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mstpass.graph.device_costs import links_of
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.fixed_memory import Sizes
from mstpass.planner.model_step import SequenceError
from mstpass.planner.progress import SPLIT, Report, silent
from mstpass.planner.request import GROUPS, Request
from mstpass.planner.result import DoesNotFit, Row, Split
from mstpass.planner.room import Room
from mstpass.planner.speed import DEVICE, step_time
from mstpass.planner.training import Training

Planned = tuple[CompiledRows, Row]


class BestSplit:
    """Compares the splits of a request's devices and heads, when it is made.

    Attributes:
        splits: all that were compared.
        request: the request with the best one.
        planned: mst's row of the best one, where it was needed to compare them.

    Raises:
        SequenceError: no number of ranks can share the model's sequences.
        DoesNotFit: weights, optimizer states and gradients alone are larger than a device.
    """

    def __init__(self, request: Request, sizes: Sizes, config: Any, report: Report):
        self._request, self._sizes, self._config, self._report = request, sizes, config, report
        self._refused: list[SequenceError] = []
        self._planned: dict[Split, Planned] = {}
        training = request.training
        counts = [n for n in range(1, training.gpus + 1) if training.gpus % n == 0]
        counts = counts if request.split else [training.sequence_ranks]
        found: list[Split] = []
        for done, count in enumerate(counts):
            report(SPLIT, done / (len(counts) + 1), f"{count} ranks a sequence")
            found += self._of_ranks(count)
        if self._refused and len(self._refused) == len([n for n in counts if n > 1]):
            raise self._refused[-1]
        best = max(found, key=_goodness)
        of_node = links_of(DEVICE).gpus
        is_sharded = training.sharding != "none" and training.gpus % of_node == 0
        replicas = training.gpus // of_node if is_sharded else 1
        if request.split and request.length and replicas > 1:
            found += self._tried(
                dataclasses.replace(best.training, ranks=of_node, replicas=replicas)
            )
            best = max(found, key=_goodness)
        report(SPLIT, 1.0, "")
        self.splits = tuple(found)
        self.request = dataclasses.replace(request, training=best.training)
        self.planned = self._planned.get(best)

    def _of_ranks(self, count: int) -> list[Split]:
        """So many ranks a sequence, with more and more groups of heads; nothing if none can."""
        training = dataclasses.replace(self._request.training, sequence_ranks=count)
        chosen = self._request.groups and count > 1
        found: list[Split] = []
        for groups in GROUPS if chosen else (training.head_groups,):
            try:
                found += self._tried(dataclasses.replace(training, head_groups=groups))
            except SequenceError as error:
                if not found:
                    self._refused.append(error)
                break
            if self._request.length and any(split.fits for split in found):
                break
        return found

    def _tried(self, training: Training) -> list[Split]:
        """What a split leads to; nothing where it has no room for any activation.

        Raises:
            SequenceError: the ranks cannot share the model's sequences.
        """
        request = dataclasses.replace(self._request, training=training)
        room, ranks = Room(request.of_rank, self._sizes), training.sequence_ranks
        try:
            room.check()
            compiled = CompiledRows(room, self._config, silent)
            if request.length is None:
                length = ranks * compiled.about_longest()
                return [Split(training, length, length > 0)]
            row = compiled.mst_row()
        except DoesNotFit:
            if training.ranks == self._request.training.ranks:
                raise  # no other one fits: it has as many shards, or fewer
            return []
        time = step_time(row.us, row.exchange_us, self._sizes, training)
        split = Split(training, request.length, row.fits, time)
        self._planned[split] = compiled, row
        return [split]


def _goodness(split: Split) -> tuple[bool, float, int, int]:
    training = split.training
    time = split.time
    good = split.length if time is None else time.tokens_per_s(training, split.length)
    return split.fits, good, -training.sequence_ranks, -training.head_groups
