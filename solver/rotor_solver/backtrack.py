"""From the choices of a program back to operations."""

from __future__ import annotations

from collections.abc import Callable

from rotor_solver.arrays import Ints
from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation

Choose = Callable[[int, int, int], int]
"""The choice for the interval [i, l] with m slots: option k ≥ 0, or the checkpoint at a_j as -j."""


def operations_of(
    length: int, slots: int, choose: Choose, saved: Ints, activation: Ints, first: Ints
) -> list[Operation]:
    """The operations for [0, L] with `slots` slots; `saved` and `activation` are what each takes away, in slots."""
    operations: list[Operation] = []
    pending: list[tuple[int, int, int] | Operation] = [(0, length, slots)]
    while pending:
        task = pending.pop()
        if not isinstance(task, tuple):
            operations.append(task)
            continue
        i, last, m = task
        if i > last:
            continue
        if i == length:
            operations.append(Loss())
            continue
        choice = choose(i, last, m)
        if choice >= 0:
            operations.append(ForwardEnable(i, choice))
            pending += [Backward(i), (i + 1, last, m - int(saved[first[i] + choice]))]
        else:
            j = -choice
            operations += [ForwardCheck(i), *(ForwardNograd(k) for k in range(i + 1, j))]
            pending += [(i, j - 1, m), (j, last, m - int(activation[j]))]
    return operations
