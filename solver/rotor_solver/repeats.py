"""Chains of repeated blocks: which stages are of one kind, and which rows of a table are therefore the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from rotor_solver.arrays import Costs, Ints
from rotor_solver.chain import Chain
from rotor_solver.grid import Grid

_LONGEST_PERIOD = 64


def kinds_of(chain: Chain) -> Ints:
    """[L] a number for every stage; stages that cost the same have the same."""
    numbers: dict[object, int] = {}
    bare = (
        replace(stage, name="", options=tuple(replace(option, name="") for option in stage.options))
        for stage in chain.stages
    )
    return np.array([numbers.setdefault(stage, len(numbers)) for stage in bare], np.int64)


def fitting_unit(kinds: Ints, taken: Ints, unit: int) -> int:
    """A unit of at most `unit` bytes into which what a period of the chain keeps, `taken` by stage, divides.

    Rows of later periods then have the slots of earlier ones. `unit` itself where the chain has no period.
    """
    for period in range(1, min(_LONGEST_PERIOD, len(kinds) // 2) + 1):
        same = kinds[:-period] == kinds[period:]
        if np.mean(same) >= 0.9:
            sums = np.convolve(taken, np.ones(period, np.int64), "valid")[: len(same)][same]
            size = Counter(sums.tolist()).most_common(1)[0][0]
            if size >= unit:
                return int(size // -(-size // unit))
            return int(unit // size * size) if size > 0 else unit
    return unit


def owners(kinds: Ints, costs: Costs, grid: Grid) -> Ints:
    """[rows] for every row, the first with the same content: its stages, its slots, and what later stages leave."""
    length = len(kinds)
    owner = np.arange(grid.tail + len(grid.place))
    nodes = np.flatnonzero(grid.place < length)
    start = np.stack(
        [kinds[grid.place[nodes]], costs.activation[grid.place[nodes]], grid.offset[nodes], grid.state[nodes]]
    )
    content = np.unique(start, axis=1, return_inverse=True)[1].reshape(-1)
    for distance in range(int((grid.band - np.arange(length)).max(initial=-1)) + 1):
        last = grid.place[nodes] + distance
        keep = last <= grid.band[grid.place[nodes]]
        nodes, content, last = nodes[keep], content[keep], last[keep]
        if distance:
            content = _numbered(content, kinds[last])
        rows = grid.start[nodes] + distance
        _, index, inverse = np.unique(_numbered(content, costs.base[last]), return_index=True, return_inverse=True)
        owner[rows] = rows[index[inverse]]
    return owner


def _numbered(first: Ints, second: Ints) -> Ints:
    """A number for every pair, the same for equal ones."""
    second = np.unique(second, return_inverse=True)[1]
    numbers: Ints = np.unique(first * (int(second.max(initial=0)) + 1) + second, return_inverse=True)[1]
    return numbers
