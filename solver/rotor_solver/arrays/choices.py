"""From the choices of a program back to operations."""

from __future__ import annotations

from collections.abc import Callable

from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation

Choose = Callable[[int, int, int], int]
"""The choice for (state, i, l): the interval [i, l] in one of the two states of a_i, coded as in `least_memory`."""


def operations_of(length: int, choose: Choose) -> list[Operation]:
    """The operations of a chain of `length` stages; `choose` is asked for intervals in the order in which they run.

    An explicit stack in place of recursion: chains may have more stages than Python allows nested calls.
    """
    operations: list[Operation] = []
    pending: list[tuple[int, int, int] | Operation] = [(0, 0, length)]
    while pending:
        task = pending.pop()
        if not isinstance(task, tuple):
            operations.append(task)
            continue
        state, i, last = task
        if i > last:
            continue
        if i == length:
            operations.append(Loss())
            continue
        choice = choose(state, i, last)
        if choice >= 0:
            operations.append(ForwardEnable(i, choice))
            pending += [Backward(i), (1, i + 1, last)]
        else:
            j = -choice
            operations += [ForwardCheck(i), *(ForwardNograd(k) for k in range(i + 1, j))]
            pending += [(state, i, j - 1), (0, j, last)]
    return operations
