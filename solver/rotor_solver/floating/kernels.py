"""Tables of `floating`, filled and read: kernels. `program` says what the problems are.

What the kernels are given, for a chain of L stages:

    costs  an `arrays.Costs`
    start  [L+1, L+2] the problem (s, t, l) has row start[s, t] + l of all tables where a_s stands alone, and row
           start[s, L+1] + l where it lies in the ā_s of the stage before, so that t = s
    least  [rows] bytes: the least memory in which the problem of each row can be solved, a_s counted if it stands alone
    table  [rows, width] seconds beyond storing everything, by row and slot; slot m stands for m · unit + offset bytes

All rows have the same offset and the same width, unlike those of the persistent program. That is simple, and chains
are short: there are L³/6 rows. A choice is coded as an integer: k ≥ 0 is the stage's option k, -1 is Fn_s, and -1 - j
is CF_s, with the stages j … l next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.compiled import compiled

INFINITE = np.int64(2**62)
"""More than any need, and small enough that a size can be added to it."""
DROP = -1
"""The choice Fn_s: a_s is dropped once stage s has run."""


@compiled()
def enable_need(costs: Any, inside: int, s: int, last: int, k: int) -> int:
    """Bytes, without a_s, that a run of stage s with a graph and its backward need themselves."""
    row = 0 if last == len(costs.run) - 1 else 1
    return int(max(costs.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[inside, s]))


@compiled(makes_arrays=True)
def least_memory(costs: Any, start: np.ndarray, rows: int) -> np.ndarray:
    """[rows] the least M, in bytes, with which each problem can be solved: `fill`, with "least M" for "least time".

    From the last s to the first: all problems that follow begin at s+1, or at s with an earlier end.
    """
    length = len(costs.run) - 1
    least = np.full(rows, INFINITE, np.int64)
    for s in range(length, -1, -1):
        for column in range(s, length + 2):
            inside = 1 if column > length else 0
            t = s if inside else column
            own = 0 if inside else costs.activation[s]
            for last in range(t, length + 1):
                row = start[s, column] + last
                if s == length:
                    least[row] = own + costs.loss_need
                    continue
                best = least[start[s + 1, t] + last] if s < t else INFINITE
                for j in range(t + 1, last + 1):
                    rest = least[start[s, column] + j - 1]
                    best = min(best, max(own + least[start[s + 1, j] + last], rest))
                best = max(best, own + costs.base[last] + costs.check_need[s, s + 1])
                if s == t:
                    for k in range(costs.first[s], costs.first[s + 1]):
                        need = enable_need(costs, inside, s, last, k)
                        if last > s:
                            need = max(need, costs.taken[inside, k] + least[start[s + 1, length + 1] + last])
                        best = min(best, own + need)
                least[row] = best
    return least


@compiled()
def slot_of(need: int, unit: int, offset: int) -> int:
    """The first slot m for which m · unit + offset ≥ need."""
    return max(0, -((offset - need) // unit))


@compiled()
def lower_by(out: np.ndarray, source: np.ndarray, low: int, shift: int, seconds: float) -> None:
    """out[m] = min(out[m], seconds + source[m - shift]) for m ≥ low. No memory is more than that of the last slot.

    `shift` may be negative, where a run frees more of its input than it keeps.
    """
    low = max(low, shift)
    end = max(low, min(len(out), len(out) + shift))
    target, origin = out[low:end], source[low - shift : end - shift]
    for m in range(len(target)):
        value = seconds + origin[m]
        target[m] = value if value < target[m] else target[m]
    for m in range(end, len(out)):
        out[m] = min(out[m], seconds + source[-1])


@compiled()
def lower_by_both(out: np.ndarray, source: np.ndarray, rest: np.ndarray, low: int, shift: int, seconds: float) -> None:
    """out[m] = min(out[m], seconds + source[m - shift] + rest[m]) for m ≥ low; shift ≥ 0."""
    low = max(low, shift)
    target, first, second = out[low:], source[low - shift : max(low, len(out)) - shift], rest[low:]
    for m in range(len(target)):
        value = seconds + first[m] + second[m]
        target[m] = value if value < target[m] else target[m]


@compiled(makes_arrays=True)
def fill(costs: Any, start: np.ndarray, least: np.ndarray, unit: int, offset: int, width: int) -> np.ndarray:
    """The recurrence of `floating`, less the time of storing everything, by (row, m); M = m · unit + offset.

        Opt(L, L, L, M) = 0                                             if M ≥ |a_L| + loss_need
        Opt(s, t, l, M) = the least of
          extra_k + Opt'(s+1, l, M - |a_s| - taken_k)                   if s = t and M - |a_s| ≥ base_l + forward_need_k
            for every option k; Opt'(s+1, s, ·) is split_{s+1} - run_{s+1}  and M - |a_s| ≥ backward_need_k - released_s
          run_{s+1} - run_s + Opt(s+1, t, l, M)                         if s < t
          run_{s+1} - run_s + Opt(s+1, j, l, M - |a_s|) + Opt(s, t, j-1, M)     for t < j ≤ l
            both                                                        if M ≥ base_l + |a_s| + check_need_{s,s+1}

    Opt'(s, l, m) is Opt(s, s, l, m) where a_s lies in ā_s: it is not counted in m, and 0 stands for |a_s| above.
    Sizes taken from M are rounded down, so that the table is a lower bound.

    The last stage of an interval skips its output. In `persistent` the checkpoint that splits the interval takes that
    off; here a checkpoint does not say where the interval before it ends, so the stage itself does: split - run.
    """
    length = len(costs.run) - 1
    table = np.full((len(least), width), np.inf)
    for s in range(length, -1, -1):
        for column in range(s, length + 2):
            inside = 1 if column > length else 0
            t = s if inside else column
            own = 0 if inside else costs.activation[s]
            for last in range(t, length + 1):
                row = start[s, column] + last
                out, low = table[row], slot_of(least[row], unit, offset)
                if s == length:
                    out[low:] = 0.0
                    continue
                if s == t:
                    for k in range(costs.first[s], costs.first[s + 1]):
                        need = slot_of(own + enable_need(costs, inside, s, last, k), unit, offset)
                        if last == s:
                            # The output that B_s makes it skip: nothing in between reads it.
                            skipped = costs.run[s + 1] - costs.split[s + 1]
                            lower_by(out, np.zeros_like(out), max(low, need), 0, costs.extra[k] - skipped)
                        else:
                            shift = (own + costs.taken[inside, k]) // unit
                            source = table[start[s + 1, length + 1] + last]
                            lower_by(out, source, max(low, need), shift, costs.extra[k])
                seconds = costs.run[s + 1] - costs.run[s]
                low = max(low, slot_of(own + costs.base[last] + costs.check_need[s, s + 1], unit, offset))
                if s < t:
                    lower_by(out, table[start[s + 1, t] + last], low, 0, seconds)
                for j in range(t + 1, last + 1):
                    source, rest = table[start[s + 1, j] + last], table[start[s, column] + j - 1]
                    lower_by_both(out, source, rest, low, own // unit, seconds)
    return table


@compiled()
def estimate(table: np.ndarray, row: int, unit: int, offset: int, memory: int, blend: float, cut: float) -> float:
    """Opt for exactly `memory` bytes, read between two slots: the bound itself for blend 0, pessimistic for blend 1."""
    m = min(slot_of(memory, unit, offset), table.shape[1] - 1)
    value = table[row, m]
    rest = m * unit + offset - memory
    if rest > 0 and blend > 0.0:
        worse = min(cut, table[row, m - 1]) if m > 0 else cut
        value += blend * rest / unit * max(0.0, worse - value)
    return float(value)


@compiled(makes_arrays=True)
def descend(
    table: np.ndarray,
    least: np.ndarray,
    costs: Any,
    start: np.ndarray,
    unit: int,
    offset: int,
    memory: int,
    blend: float,
    cut: float,
) -> np.ndarray:
    """The choices for `memory` bytes, at least those of the root's row of `least`, in the order in which they are made.

    Memory is counted in bytes on the way, so that the sequence fits; the table only says where to go.
    """
    length = len(costs.run) - 1
    choices, count, depth = np.empty(4 * length + 16, np.int64), 0, 1
    # [pending, 4] problems that wait: s, the column of `start`, l, and the bytes that they have.
    stack = np.empty((2 * length + 16, 4), np.int64)
    stack[0] = np.array([0, 0, length, memory])
    while depth > 0:
        depth -= 1
        s, column, last, total = stack[depth]
        inside = 1 if column > length else 0
        t = s if inside else column
        if t > last or s == length:
            continue
        own = 0 if inside else costs.activation[s]
        best, choice = np.inf, 0
        if s == t:
            for k in range(costs.first[s], costs.first[s + 1]):
                rest = total - own - costs.taken[inside, k]
                following = start[s + 1, length + 1] + last
                if total - own < enable_need(costs, inside, s, last, k) or (last > s and rest < least[following]):
                    continue
                whole = costs.extra[k]
                if last > s:
                    whole += estimate(table, following, unit, offset, rest, blend, cut)
                else:
                    whole += costs.split[s + 1] - costs.run[s + 1]
                if whole < best:
                    best, choice = whole, k - costs.first[s]
        if total >= own + costs.base[last] + costs.check_need[s, s + 1]:
            seconds = costs.run[s + 1] - costs.run[s]
            following = start[s + 1, t] + last
            if s < t and total >= least[following]:
                whole = seconds + estimate(table, following, unit, offset, total, blend, cut)
                if whole < best:
                    best, choice = whole, DROP
            for j in range(t + 1, last + 1):
                following, before = start[s + 1, j] + last, start[s, column] + j - 1
                if total - own < least[following] or total < least[before]:
                    continue
                whole = seconds + estimate(table, following, unit, offset, total - own, blend, cut)
                whole += estimate(table, before, unit, offset, total, blend, cut)
                if whole < best:
                    best, choice = whole, -1 - j
        if count == len(choices):
            choices = np.concatenate((choices, np.empty_like(choices)))
        choices[count] = choice
        count += 1
        if choice >= 0:
            if last > s:
                rest = total - own - costs.taken[inside, costs.first[s] + choice]
                stack[depth] = np.array([s + 1, length + 1, last, rest])
                depth += 1
        elif choice == DROP:
            stack[depth] = np.array([s + 1, t, last, total])
            depth += 1
        else:
            stack[depth] = np.array([s, column, -2 - choice, total])
            stack[depth + 1] = np.array([s + 1, -1 - choice, last, total - own])
            depth += 2
    return choices[:count]
