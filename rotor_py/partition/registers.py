"""Which values of a compiled graph never come to memory: one kernel makes them and reads them.

Inductor fuses operators that follow each other, up to the next one that it does not compile itself: a matrix product, a
convolution, attention. What passes between fused operators stays in registers. In its place, what it was made from is
in memory until it has been read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch._functorch import partitioners

from rotor_py.partition.costs.fused_costs import reduces
from rotor_py.partition.joint_graph import JointGraph
from rotor_py.partition.program import Run


def in_registers(joint: JointGraph, runs: Sequence[Run], ends: Collection[object]) -> set[Run]:
    """The runs whose values stay in registers, views of these included; what is among `ends` is kept in memory.

    A value that reduces another one is small, and counts as memory. So does one that is read on both sides of an
    operator that Inductor does not compile.
    """
    kinds = partitioners.get_default_op_list()
    readers: dict[Run, list[int]] = {}
    for position, run in enumerate(runs):
        for each in run.reads.values():
            if isinstance(each, Run):
                readers.setdefault(each, []).append(position)
    views = [kinds.is_view(run.node) for run in runs]
    apart = [
        not view and not kinds.is_fusible(run.node) and bool(joint.allocations[run.node])
        for view, run in zip(views, runs, strict=True)
    ]
    kernel = list(accumulate(apart))

    def read_at(run: Run) -> list[int] | None:
        """Where a value is read, through views as well; None if it is kept."""
        if run in ends:
            return None
        found: list[int] = []
        for position in readers.get(run, ()):
            further = read_at(runs[position]) if views[position] else [position]
            if further is None:
                return None
            found += further
        return found

    inside: set[Run] = set()
    for position, run in enumerate(runs):
        if views[position]:
            if any(each in inside for each in run.reads.values()):
                inside.add(run)
            continue
        one = isinstance(run.node.meta.get("val"), torch.Tensor)
        if not one or not kinds.is_fusible(run.node) or kinds.is_random(run.node) or reduces(run.node):
            continue
        found = read_at(run)
        if found and not any(apart[each] for each in found) and kernel[min(found)] == kernel[max(found)]:
            inside.add(run)
    return inside
