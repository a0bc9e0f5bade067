"""From the choices of a program back to operations."""

from __future__ import annotations

from collections.abc import Callable

from rotor_solver.arrays import Ints
from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation

Choose = Callable[[int, int, int, int], int]
"""The choice for the interval [i, l] with m slots, in one of the two states of a_i that `kernels` has: option k ≥ 0,
or the checkpoint at a_j as -j."""


def operations_of(
    length: int, slots: int, choose: Choose, taken: Ints, activation: Ints, first: Ints, *, most: int = 0
) -> list[Operation]:
    """The operations for [0, L] with `slots` slots; `taken` and `activation` are what each takes away, in slots.

    There are never more than `most` slots.
    """
    operations: list[Operation] = []
    pending: list[tuple[int, int, int, int] | Operation] = [(0, 0, length, slots)]
    while pending:
        task = pending.pop()
        if not isinstance(task, tuple):
            operations.append(task)
            continue
        state, i, last, m = task
        if i > last:
            continue
        if i == length:
            operations.append(Loss())
            continue
        choice = choose(state, i, last, m)
        if choice >= 0:
            operations.append(ForwardEnable(i, choice))
            left = min(most, m - int(taken[state, first[i] + choice]))
            pending += [Backward(i), (1, i + 1, last, left)]
        else:
            j = -choice
            operations += [ForwardCheck(i), *(ForwardNograd(k) for k in range(i + 1, j))]
            pending += [(state, i, j - 1, m), (0, j, last, m - int(activation[j]))]
    return operations
