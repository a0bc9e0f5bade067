"""Kernels that read values and sequences off a complete table.

`flat`, `rows`, `grid` and `costs` are those of `kernels`. Times are those beyond storing everything, in the unit of the
table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled


@compiled()
def value_of(flat: np.ndarray, rows: Any, row: int, m: int) -> float:
    """Slot m ≥ begin of a row."""
    return float(rows.final[row]) if m >= rows.high[row] else float(flat[rows.position[row] + m])


@compiled()
def estimate(
    flat: np.ndarray, rows: Any, full: np.ndarray, grid: Any, s: int, last: int, memory: int, blend: float, cut: float
) -> float:
    """Opt for exactly `memory` bytes, interpolated between two slots and two ends: the bound itself for blend 0.

    The bound is too low: it is read at the next slot above, in a row that may end earlier. The slot below and the next
    row are too high. `blend` interpolates between the two.
    """
    i, length = grid.place[s], len(grid.band)
    if memory >= full[grid.state[s], i, last]:
        return 0.0
    if length > last > grid.band[i]:
        return 2 * cut  # more than any time in the table: the last choice
    row = grid.row[s, last]
    value, start = between_slots(flat, rows, grid, s, row, memory, blend, cut), grid.last[row]
    if start < last < length and blend > 0.0 and value < cut and row + 1 < grid.start[s + 1]:
        longer = min(cut, between_slots(flat, rows, grid, s, row + 1, memory, blend, cut))
        value += (last - start) / (grid.last[row + 1] - start) * max(0.0, longer - value)
    return value


@compiled()
def between_slots(
    flat: np.ndarray, rows: Any, grid: Any, s: int, row: int, memory: int, blend: float, cut: float
) -> float:
    """A row for exactly `memory` bytes, at least its rows.begin: the slot above for blend 0."""
    beyond = memory - grid.offset[s]
    m = min(max(0, -(-beyond // grid.unit)), grid.width - 1)
    if m < rows.begin[row]:
        return 2 * cut
    value = value_of(flat, rows, row, m)
    rest = m * grid.unit - beyond
    if rest > 0 and blend > 0.0:
        worse = value_of(flat, rows, row, m - 1) if m > rows.begin[row] else cut
        value += blend * rest / grid.unit * (worse - value)
    return value


@compiled(makes_arrays=True)
def descend(
    flat: np.ndarray,
    rows: Any,
    least: np.ndarray,
    full: np.ndarray,
    costs: Any,
    grid: Any,
    cut: float,
    memory: int,
    blend: float,
    enough: float,
) -> tuple[np.ndarray, float]:
    """Return the choices of a sequence for `memory` bytes, at least least[0, 0, L], and its seconds beyond storing all.

    Memory is counted in bytes, so that the sequence fits; the table only guides. A choice is open only if the exact
    least memory of its parts allows it, so every descent ends in a sequence that fits. Choices are coded as in
    `least_memory_kernels`, in the order in which `operations_of` asks for them. Gives up, with an infinite time, beyond
    `enough`.
    """
    length = len(grid.band)
    choices = np.empty(4 * length + 16, np.int64)  # grows below: the number of splits is unknown
    # [pending, 4] pending intervals: state, i, l, and their bytes. They are disjoint, so there are at most as many as
    # stages, and a few empty ones.
    stack = np.empty((2 * length + 16, 4), np.int64)
    count, depth, seconds = 0, 1, 0.0
    stack[0] = np.array([0, 0, length, memory])
    while depth > 0:
        depth -= 1
        state, i, last, m = stack[depth]
        if i > last or i == length:
            continue
        row = 0 if last == length else 1
        s = grid.node[state, i]
        best, choice = np.inf, 0
        for k in range(costs.first[i], costs.first[i + 1]):
            need = max(costs.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i])
            if m < need:
                continue
            whole = costs.extra[k]
            if last > i:
                rest = m - costs.taken[state, k]
                if rest < least[1, i + 1, last]:
                    continue
                whole += estimate(flat, rows, full, grid, grid.node[1, i + 1], last, rest, blend, cut)
            if whole < best:
                best, choice = whole, k - costs.first[i]
        for j in range(i + 1, last + 1):
            if costs.split_floor[j] - costs.run[i] >= best:
                break  # `split_floor` never decreases: later checkpoints take at least as long
            forward = costs.split[j] - costs.run[i]
            rest = m - costs.activation[j]
            if m < costs.base[last] + costs.check_need[i, j] or rest < least[0, j, last] or m < least[state, i, j - 1]:
                continue
            whole = forward + estimate(flat, rows, full, grid, grid.node[0, j], last, rest, blend, cut)
            if whole < best:
                whole += estimate(flat, rows, full, grid, s, j - 1, m, blend, cut)
            if whole < best:
                best, choice = whole, -j
        if count == len(choices):
            choices = np.concatenate((choices, np.empty_like(choices)))
        choices[count] = choice
        count += 1
        if choice >= 0:
            seconds += costs.extra[costs.first[i] + choice]
            if last > i:
                stack[depth] = np.array([1, i + 1, last, m - costs.taken[state, costs.first[i] + choice]])
                depth += 1
        else:
            seconds += costs.split[-choice] - costs.run[i]
            stack[depth] = np.array([state, i, -choice - 1, m])
            stack[depth + 1] = np.array([0, -choice, last, m - costs.activation[-choice]])
            depth += 2
        if seconds > enough:
            return choices[:0], np.inf
    return choices[:count], seconds
