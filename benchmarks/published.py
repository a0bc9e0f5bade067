"""The published program for persistent sequences (rotor's, with Beaumont et al., HAL hal-02352969), as a plain loop.

Memory is counted in slots, sizes are rounded up, and all of both tables is filled, slot by slot, interval by interval.
With stage L, the loss, as a stage that keeps nothing (uf_L = |ā_{L+1}| = of_L = |a_{L+1}| = 0):

    Opt(i, i, m) = uf_i + ub_i      if m ≥ |a_{i+1}| + |ā_{i+1}| + of_i   and m ≥ |a_i| + |a_{i+1}| + |ā_{i+1}| + ob_i
    Opt(i, l, m) = the least of     if m ≥ |a_{l+1}| + [k > i]·|a_k| + |a_{k+1}| + of_k   for every k = i … l-1
      Opt(i, i, m) + Opt(i+1, l, m - |ā_{i+1}|)                                     (Fe_i … B_i)
      Σ_{k=i}^{j-1} uf_k + Opt(j, l, m - |a_j|) + Opt(i, j-1, m)   for i < j ≤ l      (CF_i Fn_{i+1} … Fn_{j-1})

Opt(i, i, m) is reused for Fe_i inside a longer interval, although another gradient is in memory there: plans may exceed
their limit, or recompute what would have fit. The loop is as published, too: one thread, slots outermost. Only the
condition of an interval is computed once, not for every slot, and the tables are not cleared first.

For chains of one option per stage, with nothing that the paper does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

from rotor_solver import Backward, Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Not cached on disk: the cache knows one module name, and this file is `published` and `benchmarks.published`."""
    return cast(F, njit(function))


def published_plan(chain: Chain, limit: int, slots: int = 500) -> Sequence | None:
    """What the published program returns for `limit` bytes, a_0 counted; None where it finds no plan."""
    unit = max(1, -(-limit // slots))
    activation, *costs = arrays(chain, unit)
    slots, start = limit // unit, limit // unit - int(activation[0])
    if start < 0:
        return None
    times, decisions = tables(slots, activation, *costs)
    if not np.isfinite(times[start, 0, len(chain)]):
        return None
    return Sequence(operations(decisions, start, activation, costs[0]), "published")


def table_bytes(length: int, slots: int = 500) -> int:
    """Both tables of a chain of `length` stages."""
    return 16 * (slots + 1) * (length + 1) ** 2


def arrays(chain: Chain, unit: int) -> tuple[np.ndarray, ...]:
    """Activation, saved, forward and backward scratch in slots of `unit` bytes, rounded up; then the times."""
    sizes = (
        (*chain.activation, 0),
        (*chain.saved, 0),
        (*chain.forward_temp, 0),
        chain.backward_temp,
    )
    times = ((*chain.forward_time, 0.0), chain.backward_time)
    return (
        *(np.array([-(-size // unit) for size in column], np.int64) for column in sizes),
        *(np.array(column, np.float64) for column in times),
    )


@compiled
def tables(
    slots: int,
    activation: np.ndarray,
    saved: np.ndarray,
    forward_temp: np.ndarray,
    backward_temp: np.ndarray,
    forward_time: np.ndarray,
    backward_time: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Opt by (m, i, l), for i ≤ l, and the decision that it comes from: j for a checkpoint at a_j, -1 for Fe_i."""
    count = len(saved)
    need = np.zeros((count, count), np.int64)
    for i in range(count):
        most = activation[i + 1] + forward_temp[i]
        for last in range(i + 1, count):
            if last > i + 1:
                most = max(most, activation[last - 1] + activation[last] + forward_temp[last - 1])
            need[i, last] = most + activation[last + 1]
    times = np.empty((slots + 1, count, count), np.float64)
    decisions = np.empty((slots + 1, count, count), np.int64)
    for m in range(slots + 1):
        for i in range(count):
            held = activation[i + 1] + saved[i]
            fits = m >= max(held + forward_temp[i], activation[i] + held + backward_temp[i])
            times[m, i, i] = forward_time[i] + backward_time[i] if fits else np.inf
            decisions[m, i, i] = -1
    for m in range(slots + 1):
        for distance in range(1, count):
            for i in range(count - distance):
                last = i + distance
                best, decision = np.inf, -1
                if m >= need[i, last]:
                    forward = 0.0
                    for j in range(i + 1, last + 1):
                        forward += forward_time[j - 1]
                        if m >= activation[j]:
                            seconds = forward + times[m - activation[j], j, last] + times[m, i, j - 1]
                            if seconds < best:
                                best, decision = seconds, j
                    if m >= saved[i]:
                        seconds = times[m, i, i] + times[m - saved[i], i + 1, last]
                        if seconds < best:
                            best, decision = seconds, -1
                times[m, i, last], decisions[m, i, last] = best, decision
    return times, decisions


def operations(decisions: np.ndarray, start: int, activation: np.ndarray, saved: np.ndarray) -> list[Operation]:
    """Read the plan for the whole chain in `start` slots off the table."""
    loss = len(saved) - 1
    found: list[Operation] = []
    pending: list[tuple[int, int, int] | Operation] = [(start, 0, loss)]
    while pending:
        task = pending.pop()
        if not isinstance(task, tuple):
            found.append(task)
            continue
        m, i, last = task
        j = int(decisions[m, i, last])
        if i == loss:
            found.append(Loss())
        elif j < 0:
            found.append(ForwardEnable(i))
            pending.append(Backward(i))
            if i < last:
                pending.append((m - int(saved[i]), i + 1, last))
        else:
            found += [ForwardCheck(i), *(ForwardNograd(k) for k in range(i + 1, j))]
            pending += [(m, i, j - 1), (m - int(activation[j]), j, last)]
    return found
