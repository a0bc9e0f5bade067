"""The least memory of a part with several microbatches in flight, exact in bytes, and a sequence that needs no more.

For the intervals [i, L] of `recurrence`, labels say what can be had: (bytes kept from forward to backward, bytes that
the microbatch in progress needs), both beside a_i. Those that another label beats in both are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rotor_solver.arrays.choices import operations_of
from rotor_solver.arrays.costs import Costs, Ints, costs_of
from rotor_solver.arrays.least import least_choice, least_memory
from rotor_solver.chain import Chain
from rotor_solver.pipeline.sequences.microbatch import bytes_in_flight
from rotor_solver.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Least:
    """What a part needs at least: `nbytes` for `count` microbatches in flight, with this `sequence`."""

    nbytes: int
    sequence: Sequence


def least_in_flight(chain: Chain, count: int) -> Least:
    """The least limit for which there is a memory-persistent sequence with (count - 1) · kept + peak bytes."""
    costs = costs_of(chain)
    least = least_memory(costs)
    start, length = chain.input_bytes, len(chain)

    def total(label: _Label) -> int:
        kept, need, *_ = label
        return bytes_in_flight(start + kept, start + need, count)

    best = min(_labels(costs, least), key=total)
    choices = _by_stage(best)

    def choose(state: int, i: int, last: int) -> int:
        return choices[i] if last == length else least_choice(costs, least, state, i, last)

    return Least(total(best), Sequence(operations_of(length, choose), "recompute-all"))


_Label = tuple[int, int, int, Any]
"""Bytes kept, bytes needed, the choice for the interval, and the label of the one that follows and has the loss. A
tuple, and not a class: there are thousands of them for every part."""


def _labels(costs: Costs, least: Ints) -> list[_Label]:
    """The labels of the whole part."""
    length = len(costs.activation) - 1
    found: list[list[list[_Label]]] = [[[], []] for _ in range(length + 1)]  # by i and state
    found[length] = [[(0, int(costs.loss_need), 0, ())]] * 2
    for i in reversed(range(length)):
        found[i][0] = _undominated(_choices(costs, least, found, 0, i))
        same = costs.released[0, i] == costs.released[1, i]
        found[i][1] = found[i][0] if same else _undominated(_choices(costs, least, found, 1, i))
    return found[0][0]


def _choices(costs: Costs, least: Ints, found: list[list[list[_Label]]], state: int, i: int) -> list[_Label]:
    length = len(costs.activation) - 1
    base = int(costs.base[length])
    labels: list[_Label] = []
    for k in range(costs.first[i], costs.first[i + 1]):
        size = int(costs.taken[state, k])
        backward = int(costs.backward_need[0, k] - costs.released[state, i])
        most, choice = max(base + int(costs.forward_need[k]), backward), int(k - costs.first[i])
        labels += [(size + rest[0], max(most, size + rest[1]), choice, rest) for rest in found[i + 1][1]]
    for j in range(i + 1, length + 1):
        size = int(costs.activation[j])
        most = max(base + int(costs.check_need[i, j]), int(least[state, i, j - 1]))
        labels += [(size + rest[0], max(most, size + rest[1]), -j, rest) for rest in found[j][0]]
    return labels


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    labels.sort()
    for label in labels:
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept


def _by_stage(label: _Label) -> dict[int, int]:
    """The choices for the intervals with the loss, by their first stage."""
    choices, stage = {}, 0
    while label[3]:
        choices[stage] = label[2]
        stage = stage + 1 if label[2] >= 0 else -label[2]
        label = label[3]
    return choices
