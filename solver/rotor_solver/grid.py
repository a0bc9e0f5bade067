"""How the table of the persistent program divides memory into slots, and which of its rows it has.

A row's slot m stands for m · unit + offset bytes. Every row has an offset of its own, chosen so that what a stage's
fastest option keeps is exactly a whole number of slots from its row to the next: stages that are stored one after the
other lose nothing to rounding, however many they are. Only checkpoints do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rotor_solver.arrays import Costs, Floats, Ints


class Grid(NamedTuple):
    """Node s stands for the stage place[s] and the state[s] of its input; node[state, i] finds it. The two states of a
    stage share a node where they cost the same.

    The interval from node s to stage l < L lies in the row start[s] + l - place[s], for l ≤ band[place[s]]; that to the
    loss in the row tail + s.
    """

    unit: int
    """bytes"""
    width: int
    """slots in a row"""
    place: Ints
    state: Ints
    node: Ints
    """[2, L+1]"""
    offset: Ints
    """bytes, by node"""
    slots: Ints
    """[L+1] slots that a plain a_j takes, as seen from a row whose offset is at most remainder[j]; else one less"""
    remainder: Ints
    start: Ints
    band: Ints
    """[L] the last l < L whose interval is of use"""
    tail: int
    fastest: Ints
    """[L] the fastest option of every stage, among all options"""


class Rows(NamedTuple):
    """Slot m of a row is number position + m of the table, for begin ≤ m < high.

    Below `begin` there is no plan that is of use, because it takes longer than `limit`; from `high` on, everything is
    stored.
    """

    begin: Ints
    high: Ints
    position: Ints
    limit: Floats


def fastest_options(costs: Costs) -> Ints:
    """The fastest option of every stage, among all options."""
    bounds = zip(costs.first[:-1], costs.first[1:], strict=True)
    keys = [range(low, high) for low, high in bounds]
    return np.array([min(each, key=lambda k: (costs.extra[k], costs.taken[1, k])) for each in keys], np.int64)


def grid_of(costs: Costs, fastest: Ints, room: int, unit: int, later: Floats, cut: float) -> Grid:
    """The grid for `room` bytes, for plans that take at most `cut` longer than storing everything.

    Of that, stages from i on take at least later[i]. Times are in the unit of `costs.run`.
    """
    length = len(costs.activation) - 1
    apart = np.concatenate([costs.released[0] != costs.released[1], [False]])
    node = np.cumsum(np.concatenate([[0], 1 + apart[:-1]])) + np.stack([np.zeros_like(apart), apart])
    place = np.repeat(np.arange(length + 1), 1 + apart)
    state = np.concatenate([np.arange(1 + both) for both in apart]).astype(np.int64)
    offset = np.zeros(len(place), np.int64)
    offset[0] = room % unit
    for i in range(length):
        offset[node[:, i + 1]] = (offset[node[1, i]] - costs.taken[1, fastest[i]]) % unit
    slots, remainder = np.divmod(costs.activation + offset[node[0]], unit)
    # Compared as the kernels compare it.
    useful = [np.flatnonzero(cut - later[i + 1 :] - (costs.run[i + 1 :] - costs.run[i]) >= 0) for i in range(length)]
    band = np.array([min(length - 1, i + found[-1]) if len(found) else i - 1 for i, found in enumerate(useful)], np.int64)
    rows = np.concatenate([band - np.arange(length) + 1, [0]])[place]
    ends = np.cumsum(rows)
    return Grid(
        unit,
        room // unit + 2,
        place,
        state,
        node.astype(np.int64),
        offset,
        slots,
        remainder,
        (ends - rows).astype(np.int64),
        band,
        int(ends[-1]),
        fastest,
    )
