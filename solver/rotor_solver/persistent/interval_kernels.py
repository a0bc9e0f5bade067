"""Kernels that find the least memory of all intervals of a chain, and build sequences from a complete table.

The interval [i, l] has two states, as in `table_kernels`: in state 0, a_i is stored by itself; in state 1, it is part
of the ā_i that the previous stage saved. The code of a choice for an interval is an integer: k ≥ 0 for Fe_i with option
k, or -j < 0 for CF_i with a checkpoint at a_j. `table_kernels` describes the other arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled

INFINITE = np.int64(2**62)  # Bytes: more than any need, and adding a size does not overflow


@compiled()
def least_memory(costs: Any) -> np.ndarray:
    """Return the least bytes m for which Opt(i, l, m) is finite: [2, L+1, L+1], by (state, i, l).

    This is the recurrence of `table_kernels.fill` with bytes in place of seconds. The result decides which limits are
    refused, where the rows of a table begin, and which choices `descend` may make.
    """
    length = len(costs.activation) - 1
    least = np.full((2, length + 1, length + 1), INFINITE)
    kept = np.full((length + 1, length + 1), INFINITE)  # |a_j| + least[0, j, l], by (l, j)
    least[:, length, length] = costs.loss_need
    kept[length, length] = costs.loss_need + costs.activation[length]
    for distance in range(length + 1):
        for i in range(min(length, length + 1 - distance)):
            last = i + distance
            row, base = 0 if last == length else 1, costs.base[last]
            checks = np.maximum(base + costs.check_need[i, i + 1 : last + 1], kept[last, i + 1 : last + 1])
            for state in range(2):
                best = INFINITE
                if last > i:
                    best = np.maximum(checks, least[state, i, i:last]).min()
                for k in range(costs.first[i], costs.first[i + 1]):
                    need = max(base + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i])
                    if last > i:
                        need = max(need, costs.taken[state, k] + least[1, i + 1, last])
                    best = min(best, need)
                least[state, i, last] = best
            kept[last, i] = costs.activation[i] + least[0, i, last]
    return least


@compiled()
def estimate(
    flat: np.ndarray, rows: Any, full: Any, grid: Any, s: int, last: int, memory: int, blend: float, cut: float
) -> float:
    """Interpolate Opt for exactly `memory` bytes between two slots and two rows; `blend` 0 gives a lower bound.

    The lower bound reads the next slot above, in a row that may end at an earlier stage, so it is too low. The slot
    below, and the next row, which ends at a later stage, give times that are too high: `blend` is their weight.
    """
    i, length = grid.stage[s], len(grid.band)
    if memory >= full[grid.state[s]][i][last]:
        return 0.0
    if length > last > grid.band[i]:
        return 2 * cut  # more than any time in the table, so that any other choice is better
    row = grid.row[s][last]
    value, start = between_slots(flat, rows, grid, s, row, memory, blend, cut), grid.last[row]
    if start < last < length and blend > 0.0 and value < cut and row + 1 < grid.start[s + 1]:
        longer = min(cut, between_slots(flat, rows, grid, s, row + 1, memory, blend, cut))
        value += (last - start) / (grid.last[row + 1] - start) * max(0.0, longer - value)
    return value


@compiled()
def between_slots(
    flat: np.ndarray, rows: Any, grid: Any, s: int, row: int, memory: int, blend: float, cut: float
) -> float:
    """Interpolate a row's time for exactly `memory` bytes; `blend`: weight of the slot below against the slot above."""
    beyond, at, high = memory - grid.offset[s], rows.position[row], rows.high[row]
    m = min(max(0, -(-beyond // grid.unit)), grid.width - 1)
    if m < rows.begin[row]:
        return 2 * cut
    value = float(flat[at + min(m, high)])
    rest = m * grid.unit - beyond
    if rest > 0 and blend > 0.0:
        worse = float(flat[at + min(m - 1, high)]) if m > rows.begin[row] else cut
        value += blend * rest / grid.unit * (worse - value)
    return value


@compiled()
def descend(table: Any, cut: float, memory: int, blend: float, enough: float) -> tuple[list[int], float]:
    """Return the choices of a sequence for `memory` bytes, and how much longer it takes than storing everything.

    Memory is counted in exact bytes; the table only tells which choices are fast. A choice is allowed only if each of
    its parts gets its exact least memory, so that the sequence fits if `memory` is at least least[0, 0, L]. Choices are
    coded as in the docstring of this file, in the order in which `operations_of` asks for them. Returns no choices and
    an infinite time if the sequence takes more than `enough`. `table` is (flat, rows, least, full, costs, grid).
    """
    flat, rows, least, full, costs, grid = table
    length = len(grid.band)
    choices = [0 for _ in range(0)]
    pending, seconds = [(0, 0, length, memory)], 0.0  # state, i, l and bytes of intervals
    while len(pending) > 0:
        state, i, last, m = pending.pop()
        if i > last or i == length:
            continue
        row, s = 0 if last == length else 1, grid.node[state][i]
        best, choice = np.inf, 0
        for k in range(costs.first[i], costs.first[i + 1]):
            need = costs.backward_need[row][k] - costs.released[state][i]
            rest = m - costs.taken[state][k]
            if m < max(costs.base[last] + costs.forward_need[k], need) or (last > i and rest < least[1][i + 1][last]):
                continue
            whole = costs.extra[k]
            if last > i:
                whole += estimate(flat, rows, full, grid, grid.node[1][i + 1], last, rest, blend, cut)
            if whole < best:
                best, choice = whole, k - costs.first[i]
        for j in range(i + 1, last + 1):
            if costs.split_floor[j] - costs.run[i] >= best:
                break  # `split_floor` never decreases: later checkpoints take at least as long
            rest = m - costs.activation[j]
            need = costs.base[last] + costs.check_need[i][j]
            if m < need or rest < least[0][j][last] or m < least[state][i][j - 1]:
                continue
            whole = costs.split[j] - costs.run[i]
            whole += estimate(flat, rows, full, grid, grid.node[0][j], last, rest, blend, cut)
            if whole < best:
                whole += estimate(flat, rows, full, grid, s, j - 1, m, blend, cut)
            if whole < best:
                best, choice = whole, -j
        choices.append(choice)
        if choice >= 0:
            seconds += costs.extra[costs.first[i] + choice]
            pending.append((1, i + 1, last, m - costs.taken[state][costs.first[i] + choice]))
        else:
            seconds += costs.split[-choice] - costs.run[i]
            pending.append((state, i, -choice - 1, m))
            pending.append((0, -choice, last, m - costs.activation[-choice]))
        if seconds > enough:
            return choices[:0], np.inf
    return choices, seconds
