"""Data of a chain that all its tables share, and the layout of tables in slots and rows.

Every row has its own offset in bytes, so that mainly checkpoints are rounded to slots (Note [Rows and windows] in
`table_kernels`). Of long intervals, only some have rows. In chains of repeated blocks, equal rows share their times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rotor_solver.chain import Chain
from rotor_solver.least_memory import Costs, Floats, Ints, costs_of, least_memory
from rotor_solver.segments import least_sequence, store_all
from rotor_solver.sequence import Sequence


class Spacing(NamedTuple):
    """Selects the intervals [i, i + d] that have rows: all with d < parts · period, and some of the longer ones.

    For d < 2 · parts · period, intervals have rows if they end at a whole period; for d < 4 · parts · period, at every
    second period, and so on: about `parts` rows for every doubling of d. Periods are counted back from stage L-1. If
    [i, l] has a row, so has [i+1, l], whose times Fe_i reads: times of a row that ends earlier would lower the bound.
    """

    parts: int
    period: int = 1

    def ended(self, length: int) -> NDArray[np.bool_]:
        """Return, by (i, l), whether the interval [i, l] has a row of its own: [L, L]."""
        stages = np.arange(length)
        distance = stages - stages[:, None]
        periods = distance // (self.parts * self.period)
        step = np.where(periods < 1, 1, self.period * 2 ** np.log2(np.maximum(periods, 1)).astype(np.int64))
        ended: NDArray[np.bool_] = (distance >= 0) & ((length - 1 - stages) % step == 0)
        return ended

    def dense(self, length: int) -> bool:
        return length <= self.parts * (2 if self.period == 1 else self.period)


def stops_of(ended: NDArray[np.bool_]) -> Ints:
    """Return stop, [L]: a row that ends at stage l stands for intervals that end at stages l … stop[l]-1."""
    length = len(ended)
    if not length:
        return np.zeros(0, np.int64)
    following = np.where(ended, np.arange(length), length)
    following = np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]
    first = ended.argmax(axis=0)  # i of the longest interval that ends at l: the next row from i ends farthest from l
    stages = np.arange(length)
    stop: Ints = np.append(following, np.full((length, 1), length), axis=1)[first, stages + 1]
    return stop


ANYTHING = 2**62  # Bytes; more than any memory


class Grid(NamedTuple):
    """The slots and rows of a table, as arrays that kernels read.

    Node s stands for stage[s] together with state[s] of its input; node[state, i] is the node of stage i. The two
    states of a stage share a node if they cost the same.

    The interval from node s to stage l < L has row row[s, l], if l ≤ band[stage[s]]; the interval from node s to the
    loss has row tail + s. An interval without its own row uses a row that ends earlier, at stage last[row]. That gives
    a lower bound of its time, since it takes no longer without its last stages.
    """

    unit: int  # Bytes from one slot to the next
    width: int  # Upper bound of the number of slots in a row
    stage: Ints  # [nodes] the stage; L for the loss
    # [nodes] 1 if the stage's input is part of the previous stage's ā, 0 if it is stored by itself or costs the same.
    state: Ints
    node: Ints  # [2, L+1] by (state, i), the node of stage i
    offset: Ints  # [nodes] bytes that slot 0 of the node's rows stands for
    # [L+1] slots that a checkpoint a_j takes from a row with offset ≤ remainder[j]; it takes one less from other rows.
    slots: Ints
    remainder: Ints
    start: Ints  # [nodes] index of the first row of the node
    band: Ints  # [L] by i, the last l < L such that a useful plan can have the interval [i, l]
    row: Ints  # [nodes, L+1] index of the row for the interval from a node to a stage; -1 if there is none
    # [L+1, L+1] by (l, j), the row of the interval from a checkpoint at a_j to stage l: contiguous for loops over j.
    after: Ints
    last: Ints  # [rows] the stage at which the row ends; L for the loss
    stop: Ints  # [L+1] rows that end at stage l stand for intervals to stages l … stop[l]-1
    base: Ints  # [L+1] bytes: the least `costs.base` of stages l … stop[l]-1
    tail: int  # Index of the first of the rows that end at the loss; they follow all other rows


class Rows(NamedTuple):
    """Where each row's times lie in the table: slot m, begin ≤ m < high, at index position + m. All arrays are [rows].

    Below `begin`, all plans take longer than `limit`, or none fits. From `high` on, the time is `final`: zero if the
    whole interval is stored there, else the time of the last slot, as no useful plan gives the interval more memory.
    """

    begin: Ints  # First slot; moved up when the row is complete, past times above `limit`
    high: Ints  # Slot after the last one
    position: Ints  # Index in the table that slot 0 would have; may be negative
    limit: Floats  # Longest time of useful plans, in the unit of the table; negative if no plan is useful
    final: Floats  # Time from `high` on; infinite at first if it is to be the time of the row's last slot


class Windows(NamedTuple):
    """Memory of each interval in plans that may beat the best known: arrays [nodes, L+1], by first node and last stage.

    Such a plan gives the interval `low` to `high` bytes, and takes at least `outside` seconds outside of it, beyond
    those of storing everything. `outside` is infinite if no such plan has the interval.
    """

    low: Ints
    high: Ints
    outside: Floats


def grid_of(
    costs: Costs, fastest: Ints, kinds: Ints, room: int, unit: int, spacing: Spacing, later: Floats, cut: float
) -> Grid:
    """Build the grid for plans within `room` bytes that take at most `cut` longer than storing everything."""
    length = len(costs.activation) - 1
    apart = np.concatenate([costs.released[0] != costs.released[1], [False]])
    node = np.cumsum(np.concatenate([[0], 1 + apart[:-1]])) + np.stack([np.zeros_like(apart), apart])
    stage = np.repeat(np.arange(length + 1), 1 + apart)
    state = np.concatenate([np.arange(1 + both) for both in apart]).astype(np.int64)
    offset = _offsets(costs.taken[1, fastest], kinds, room, unit)
    slots, remainder = np.divmod(costs.activation + offset, unit)
    # The same terms in the same order as in `rows_of`, since sums in another order differ in their last digits.
    kept = [np.flatnonzero(cut - later[i + 1 :] - (costs.split[i + 1 :] - costs.run[i]) >= 0) for i in range(length)]
    band = np.array([min(length - 1, i + each[-1]) if len(each) else i - 1 for i, each in enumerate(kept)], np.int64)
    ended = spacing.ended(length)
    stop, base, stages = np.append(stops_of(ended), length + 1), costs.base.copy(), np.arange(length)
    for last in np.flatnonzero(stop[:-1] > stages + 1):
        base[last] = costs.base[last : stop[last]].min()
    useful = (stages >= stages[:, None]) & (stages <= band[:, None])
    none = np.zeros((1, length), np.bool_)  # intervals that begin at the loss have no end before it
    own = np.concatenate([ended & useful, none])[stage]
    rows = own.sum(axis=1)
    start, tail = np.cumsum(rows) - rows, int(rows.sum())
    row = np.where(np.concatenate([useful, none])[stage], start[:, None] + np.cumsum(own, axis=1) - 1, -1)
    row = np.column_stack([row, tail + np.arange(len(stage))]).astype(np.int64)
    return Grid(
        unit=unit,
        width=room // unit + 2,
        stage=stage,
        state=state,
        node=node.astype(np.int64),
        offset=offset[stage],
        slots=slots,
        remainder=remainder,
        start=start.astype(np.int64),
        band=band,
        row=row,
        after=row[node[0]].T.copy(),
        last=np.concatenate([np.nonzero(own)[1], np.full(len(stage), length)]).astype(np.int64),
        stop=stop.astype(np.int64),
        base=base,
        tail=tail,
    )


def nodes_of(grid: Grid) -> Ints:
    """Return the node of every row: [rows]."""
    nodes = np.arange(len(grid.stage))
    return np.append(np.repeat(nodes, np.diff(np.append(grid.start, grid.tail))), nodes)


def _offsets(taken: Ints, kinds: Ints, room: int, unit: int) -> Ints:
    """Return the offset of every stage's rows, [L+1] bytes, reusing that of an earlier, equal stage if it is close.

    Rows with equal offsets can share their times. Reuse makes all stages together lose at most one slot of memory.
    """
    offset = [room % unit]
    seen: dict[tuple[int, ...], list[int]] = {}
    for i, size in enumerate(taken.tolist()):
        exact = (offset[-1] - size) % unit
        known = seen.setdefault(tuple(kinds[i : i + 2].tolist()), [])
        close = [other for other in known if 0 <= other - exact <= unit // len(taken)]
        if not close and len(known) < 8:  # with more offsets per stage, rows would hardly share times; not measured
            known.append(exact)
        offset.append(close[0] if close else exact)
    return np.array(offset, np.int64)


def rows_of(
    least: Ints, full: Ints, costs: Costs, grid: Grid, later: Floats, windows: Windows, cut: float, owner: Ints
) -> tuple[Rows, int]:
    """Lay out rows in a table; return them, and the number of entries of the table.

    A row has the widest bounds of all the intervals that it stands for. `least` and `full` are [2, L+1, L+1], in
    bytes; `later` is [L+1]; `later` and `windows.outside` have the unit of `cut`. A row shares the times of row
    owner[row], whose slots range from the lowest `begin` to the highest `high` of all rows that share its times.
    """
    length, first, nodes = len(grid.band), grid.last, nodes_of(grid)
    ends = np.full(len(first), length + 1)
    ends[: grid.tail] = np.minimum(grid.stop[first[: grid.tail]], grid.band[grid.stage[nodes[: grid.tail]]] + 1)
    counts = ends - first
    starts = np.cumsum(counts) - counts
    # Arrays by interval; intervals of the same row are neighbours.
    s, last = np.repeat(nodes, counts), np.arange(counts.sum()) + np.repeat(first - starts, counts)
    i, state, offset = grid.stage[s], grid.state[s], grid.offset[s]
    # An interval that ends before the loss runs after the loss, as a recomputation. Subtract from the cut the seconds
    # of its first run, without a graph, and `later`, by which the stages after it take at least longer than stored.
    following = np.minimum(last + 1, length)
    time = np.where(last < length, cut - later[following] - (costs.split[following] - costs.run[i]), cut)
    limit = np.maximum.reduceat(np.minimum(time, cut - windows.outside[s, last]), starts)

    def slot_of(need: Ints) -> Ints:
        slots: Ints = np.maximum(0, -((offset - need) // grid.unit))
        return slots

    whole = np.minimum(grid.width, np.minimum.reduceat(slot_of(full[state, i, last]), starts))
    high = np.maximum.reduceat(np.minimum(grid.width, slot_of(windows.high[s, last]) + 1), starts)
    high = np.minimum(high, whole)
    low = np.minimum.reduceat(slot_of(np.maximum(least[state, i, last], windows.low[s, last])), starts)
    low, limit = np.minimum(low, high), np.maximum(limit, -1.0)
    of_use = limit >= 0
    np.maximum.at(limit, owner, limit.copy())
    begin, most = np.full_like(low, grid.width), np.zeros_like(high)
    np.minimum.at(begin, owner[of_use], low[of_use])
    np.maximum.at(most, owner[of_use], high[of_use])
    own = (owner == np.arange(len(owner))) & (limit >= 0)
    sizes = np.where(own, np.maximum(0, most - begin) + 1, 0)  # one more entry for `final`
    position = np.cumsum(sizes) - sizes - begin
    final = np.where((most >= whole) & (whole < grid.width), 0.0, np.inf)
    begin = np.where(limit >= 0, begin, grid.width)
    return Rows(begin[owner], most[owner], position[owner], limit[owner], final[owner]), int(sizes.sum())


# Upper bound of a period, in stages: longer ones repeat too few times for shared rows to save much. Not measured.
_LONGEST_PERIOD = 64
# Lower bound of the share of a chain that repeats a period without a break. Not measured; a wrong value costs time.
_REPEATED = 0.87


def kinds_of(chain: Chain) -> Ints:
    """Return a number for every stage, [L]: the same for stages with the same costs."""
    numbers: dict[object, int] = {}
    bare = (
        replace(stage, name="", options=tuple(replace(option, name="") for option in stage.options))
        for stage in chain.stages
    )
    return np.array([numbers.setdefault(stage, len(numbers)) for stage in bare], np.int64)


def period_of(kinds: Ints) -> int:
    """Return the shortest period, in stages, with which at least `_REPEATED` of the chain repeats; 0 without any."""
    length = len(kinds)
    for period in range(1, min(_LONGEST_PERIOD, length // 8) + 1):
        breaks = np.flatnonzero(np.append(np.concatenate([[True], kinds[:-period] != kinds[period:]]), True))
        if np.diff(breaks).max() - 1 + period >= _REPEATED * length:
            return period
    return 0


def fitting_unit(kinds: Ints, period: int, taken: Ints, unit: int) -> int:
    """Return a slot size of at most `unit` bytes of which a period's kept bytes are nearly a multiple, or a divisor."""
    same = kinds[:-period] == kinds[period:]
    sums = np.convolve(taken, np.ones(period, np.int64), "valid")[: len(same)][same]
    size = Counter(sums.tolist()).most_common(1)[0][0]
    if size >= unit:
        least = -(-size // unit)
        # Up to an eighth more slots if that lowers the remainder; not measured.
        fitting = size // np.arange(least, min(size, least + least // 8) + 1)
        return int(fitting[np.argmin(size % fitting)])
    return int(unit // size * size) if size > 0 else unit


def owners(kinds: Ints, costs: Costs, grid: Grid) -> Ints:
    """Return for every row, [rows], the first row with equal times: same stages, offset and later stages' bytes."""
    owner, length = np.arange(len(grid.last)), len(kinds)
    nodes = np.flatnonzero(grid.stage < length)
    firsts = grid.stage[nodes]
    starts = np.stack([kinds[firsts], costs.activation[firsts], grid.offset[nodes], grid.state[nodes]])
    # `content` identifies the interval [i, i + distance] of each node, by its content without the last stage, and that
    # stage's kind.
    content = np.unique(starts, axis=1, return_inverse=True)[1].reshape(-1)
    kinds = np.unique(kinds, return_inverse=True)[1]
    bases = np.unique(grid.base[:length], return_inverse=True)[1]
    for distance in range(length):
        known = (firsts + distance < length) & (firsts + distance <= grid.band[firsts])
        nodes, firsts, content = nodes[known], firsts[known], content[known]
        last = firsts + distance
        content = np.unique(content * length + kinds[last], return_inverse=True)[1]
        rows = grid.row[nodes, last]
        ended = grid.last[rows] == last
        _, first, same = np.unique(content[ended] * length + bases[last[ended]], return_index=True, return_inverse=True)
        owner[rows[ended]] = rows[ended][first][same]
    return owner


def full_memory(costs: Costs, fastest: Ints) -> Ints:
    """Return the least bytes in which the interval [i, l] can be stored whole: [2, L+1, L+1], by (state, i, l).

    Every stage is stored by its fastest option. No plan is faster, so rows end at these bytes. From the last stage to
    the first: an interval needs the bytes of its first stage's run, or what this keeps plus the need of the others.
    """
    length = len(fastest)
    full = np.full((2, length + 1, length + 1), costs.loss_need, np.int64)
    for i in range(length - 1, -1, -1):
        k, row = fastest[i], np.where(np.arange(i, length + 1) == length, 0, 1)
        for state in range(2):
            backward = costs.backward_need[row, k] - costs.released[state, i]
            need = np.maximum(costs.base[i:] + costs.forward_need[k], backward)
            need[1:] = np.maximum(need[1:], costs.taken[state, k] + full[1, i + 1, i + 1 :])
            full[state, i, i:] = need
    return full


class Problem:
    """Data that all tables of a chain share."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.costs = chain, (costs := costs_of(chain))
        self.stored = store_all(chain).lower_bound or 0.0  # Seconds of storing everything
        self.least = least_memory(costs)
        self.fastest = costs.first[:-1] + np.array([stage.fastest_option for stage in chain], np.int64)
        # [2, L+1, L+1] bytes, by (state, i, l), from which on the whole interval is stored.
        self.full = full_memory(costs, self.fastest)
        self.kinds = kinds_of(chain)
        self.period = period_of(self.kinds)  # In stages; 0 if most of the chain does not repeat

    @property
    def needed(self) -> int:
        """Least bytes, without the chain's input, in which there is a memory-persistent sequence."""
        return int(self.least[0, 0, len(self.chain)])

    def least_sequence(self) -> Sequence:
        return least_sequence(self.costs, self.least)
