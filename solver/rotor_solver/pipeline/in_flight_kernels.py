"""Kernels for the recurrence of `sequences`, for all numbers of slots at once.

Slot m stands for m · unit + offset bytes. `taken` ([2, options]) and `activation` ([L+1]) are the memory that Fe_i and
a checkpoint keep, in slots, rounded up for sequences that fit, or down for lower bounds. Needs of running operations
are compared in bytes. `costs` is a `least_memory.Costs`; a time is seconds minus those of storing everything. A `table`
is (again, costs, taken, activation, unit, offset).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.jit_policy import compiled


@compiled()
def slot_of(need: int, unit: int, offset: int) -> int:
    """Return the first slot m with m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


@compiled()
def need_of(costs: Any, state: int, i: int, last: int, k: int) -> int:
    """Return the bytes that Fe_i by option k (an index into `costs`) and B_i need in [i, last], with a_i in `state`."""
    row = 0 if last == len(costs.activation) - 1 else 1
    return int(max(costs.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i]))


@compiled()
def lower(row: np.ndarray, begin: int, inner: np.ndarray, less: int, seconds: float) -> None:
    """row[m] = min(row[m], seconds + inner[m - less]) for m ≥ begin; past its end, `inner` counts as its last entry.

    Loops run over views that begin at the first slot, since Numba does not vectorize indices that may be negative.
    """
    end = min(len(row), len(inner) + less)
    if begin < end:
        out, shifted = row[begin:end], inner[begin - less : end - less]
        for m in range(len(out)):
            out[m] = min(out[m], seconds + shifted[m])
    for m in range(max(begin, end), len(row)):
        row[m] = min(row[m], seconds + inner[len(inner) - 1])


@compiled()
def lower_by_both(
    row: np.ndarray, begin: int, right: np.ndarray, less: int, left: np.ndarray, more: int, seconds: float
) -> None:
    """row[m] = min(row[m], seconds + right[m - less] + left[m + more]) for m ≥ begin."""
    if begin < len(row):
        out, rights, lefts = row[begin:], right[begin - less : len(row) - less], left[begin + more : len(row) + more]
        for m in range(len(out)):
            out[m] = min(out[m], seconds + (rights[m] + lefts[m]))


@compiled()
def fill(table: Any) -> None:
    """Fill `again`, [2, L, L, width] by (state, i, l, m), infinite before, with times of [i, l] after the loss."""
    again, costs, taken, activation, unit, offset = table
    length, width = len(costs.activation) - 1, again.shape[3]
    none = int(np.int64(0))  # Numba would compile a second version for a literal
    for distance in range(length):
        for i in range(length - distance):
            last = i + distance
            for state in range(2):
                row = again[state, i, last]
                if state == 1 and costs.released[0, i] == costs.released[1, i]:
                    for m in range(width):
                        row[m] = again[0, i, last, m]
                    continue
                for k in range(costs.first[i], costs.first[i + 1]):
                    need, less = slot_of(need_of(costs, state, i, last, k), unit, offset), taken[state, k]
                    if last == i:
                        for m in range(need, width):
                            row[m] = min(row[m], costs.extra[k])
                        continue
                    lower(row, max(need, less), again[1, i + 1, last], less, costs.extra[k])
                for j in range(i + 1, last + 1):
                    seconds, less = costs.split[j] - costs.run[i], activation[j]
                    need = max(less, slot_of(costs.base[last] + costs.check_need[i, j], unit, offset))
                    lower_by_both(row, need, again[0, j, last], less, again[state, i, j - 1], none, seconds)


@compiled()
def fill_kept(kept: np.ndarray, table: Any, beyond: int, below: int, most: int) -> None:
    """Fill kept[state, i, r], r ≤ most: time of [i, L] if it may keep r - below slots, and r + beyond slots are free.

    Kept slots are in memory at the loss. Before it, up to `below` more may be, as a stage can free more of its input
    than it saves. `kept` is [2, L+1, most + 1 or more].
    """
    again, costs, taken, activation, unit, offset = table
    length = len(costs.activation) - 1
    kept[:, :, : most + 1] = np.inf
    for r in range(max(below, slot_of(costs.loss_need, unit, offset) - beyond), most + 1):
        kept[:, length, r] = 0.0
    for i in range(length - 1, -1, -1):
        for state in range(2):
            row = kept[state, i, : most + 1]
            if state == 1 and costs.released[0, i] == costs.released[1, i]:
                for r in range(most + 1):
                    row[r] = kept[0, i, r]
                continue
            for k in range(costs.first[i], costs.first[i + 1]):
                less = taken[state, k]
                need = slot_of(need_of(costs, state, i, length, k), unit, offset) - beyond
                lower(row, max(0, need, less), kept[1, i + 1, : most + 1], less, costs.extra[k])
            for j in range(i + 1, length + 1):
                seconds, less = costs.split[j] - costs.run[i], activation[j]
                need = max(0, less, slot_of(costs.base[length] + costs.check_need[i, j], unit, offset) - beyond)
                lower_by_both(row, need, kept[0, j], less, again[state, i, j - 1], beyond, seconds)


@compiled()
def choice(kept: np.ndarray, table: Any, beyond: int, state: int, i: int, last: int, slots: int) -> int:
    """Return the choice with the least time of [i, last], i < L, coded as in `persistent.interval_kernels`.

    `slots` is the number of free slots; for last = L, it is r of `fill_kept`.
    """
    again, costs, taken, activation, unit, offset = table
    length = len(costs.activation) - 1
    m = slots + beyond if last == length else slots
    best, found = np.inf, 0
    for k in range(costs.first[i], costs.first[i + 1]):
        rest = slots - taken[state, k]
        if rest < 0 or m < slot_of(need_of(costs, state, i, last, k), unit, offset):
            continue
        seconds = costs.extra[k]
        if last == length:
            seconds += kept[1, i + 1, rest]
        elif last > i:
            seconds += again[1, i + 1, last, rest]
        if seconds < best:
            best, found = seconds, k - costs.first[i]
    for j in range(i + 1, last + 1):
        rest = slots - activation[j]
        if rest < 0 or m < slot_of(costs.base[last] + costs.check_need[i, j], unit, offset):
            continue
        right = kept[0, j, rest] if last == length else again[0, j, last, rest]
        seconds = costs.split[j] - costs.run[i] + (right + again[state, i, j - 1, m])
        if seconds < best:
            best, found = seconds, -j
    return int(found)


@compiled()
def best_kept(table: Any, count: int, below: int) -> tuple[float, int]:
    """Return the least time, and the number of slots, a_0 included, that each microbatch keeps then; -1 if none fits.

    The last slot of `again` stands for the limit, `count` is the number of microbatches in flight.
    """
    again, costs, _, activation, _, _ = table
    limit = again.shape[3] - 1
    kept = np.empty((2, len(costs.activation), limit // count + below + 1))
    best, best_slots = np.inf, -1
    for slots in range(activation[0], limit // count + 1):
        beyond, most = limit - count * slots - below, slots + below
        fill_kept(kept, table, beyond, below, most)
        found = kept[0, 0, most - activation[0]]
        if found < best:
            best, best_slots = found, slots
    return best, best_slots
