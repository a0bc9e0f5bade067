"""A chain's costs as arrays, the least memory of its intervals of stages, and operations from coded choices.

`persistent.interval_kernels` defines the states of intervals and the codes of choices.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rotor_solver.chain import Chain, check_chain
from rotor_solver.jit_policy import kernels_for
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Task = TypeVar("Task", bound=tuple[int, ...])


class Costs(NamedTuple):
    """Costs of a chain in bytes and seconds, and the terms of the memory conditions of `recurrence.optimum`.

    With G(i) the gradients of stages i … L-1, and held = |a_L| if the caller keeps the output, else 0:

        base_l          = |a_{l+1}| + G(l+1) + held for l < L: in memory while [i, l] runs; 0 for l = L
        check_need_ij   = the most of [k > i]·|a_k| + |a_{k+1}| + scratch_k for k = i … j-1: forwards from a_i to a_j
        backward_need_k = the peak of B_i with option k, without a_i and everything before it; or the bytes after
                          B_i, if more. Row 0 is for l = L: ā was saved before the loss, and contains a_L if stage i
                          is the last one. Row 1 is for l < L: ā was recomputed after the loss.

    The options of stage i are first[i] … first[i+1]-1. `extra` is how much longer an option takes than the stage's
    fastest one. `released` is the part of a_i that a run of stage i with a graph frees: row 0 if a_i is stored by
    itself (state 0), row 1 if it is part of ā_i (state 1). `taken` is what the run saves, less what it frees.
    """

    activation: Ints  # [L+1] bytes of a_0 … a_L
    run: Floats  # [L+1] seconds of the forwards without a graph of stages 0 … i-1
    # [L+1] seconds: run[j], less the time that stage j-1 saves if it computes no output. After a checkpoint at a_j,
    # stage j-1 runs again right before its backward, and then computes no output. The forwards from a_i to the
    # checkpoint therefore count as split[j] - run[i].
    split: Floats
    # [L+1] seconds: the least split[k] for k ≥ j, which never decreases with j, so that loops over j may end early.
    split_floor: Floats
    check_need: Ints  # [L+1, L+1] bytes, by (i, j)
    base: Ints  # [L+1] bytes, by l
    first: Ints  # [L+1] index of every stage's first option among the options of all stages
    extra: Floats  # [options] seconds
    taken: Ints  # [2, options] bytes, by the state of a_i
    forward_need: Ints  # [options] bytes: saved, and the scratch of the forward
    backward_need: Ints  # [2, options] bytes, by whether l < L
    released: Ints  # [2, L] bytes, by the state of a_i
    loss_need: int  # Bytes of δ_L, as large as a_L, and of the loss's scratch; a_L itself is not counted


def costs_of(chain: Chain) -> Costs:
    check_chain(chain)
    length = len(chain)
    activation = np.array(chain.activation, np.int64)
    gradient = np.array(chain.gradient, np.int64)
    left = np.concatenate([np.cumsum(gradient[::-1])[::-1], [0]]).astype(np.int64)
    held = chain.activation[-1] if chain.output_held and length else 0
    first = np.concatenate([[0], np.cumsum([len(stage.options) for stage in chain.stages])]).astype(np.int64)
    options = [option for stage in chain.stages for option in stage.options]
    stage_of = np.repeat(np.arange(length), np.diff(first))
    seconds = np.array([option.forward_time + option.backward_time for option in options], np.float64)
    saved = np.array([option.kept for option in options], np.int64)
    temps = np.array([[o.backward_temp, o.backward_temp_of_replay] for o in options], np.int64).reshape(-1, 2).T
    inputs, outputs = activation[stage_of], activation[stage_of + 1]
    holds = np.array([stage_of < length - 1, np.ones(len(options), np.bool_)]) * held
    during = inputs + outputs + left[stage_of + 1] + holds + saved + temps
    released = np.array(chain.released, np.int64).reshape(length, 2).T.copy()
    run = np.concatenate([[0.0], np.cumsum(chain.nograd_time)]).astype(np.float64)
    split = run - np.concatenate([[0.0], np.array(chain.skipped_output_time, np.float64)])
    return Costs(
        activation=activation,
        run=run,
        split=split,
        split_floor=np.minimum.accumulate(split[::-1])[::-1].copy(),
        check_need=_check_need(activation, np.array(chain.nograd_temp, np.int64)),
        base=np.concatenate([activation[1:] + left[1:] + held, [0]]).astype(np.int64),
        first=first,
        extra=seconds - np.minimum.reduceat(seconds, first[:-1])[stage_of] if length else seconds,
        taken=saved - np.take(released, stage_of, axis=1),  # `released[:, stage_of]` would need kernels for its layout
        forward_need=saved + np.array([option.forward_temp for option in options], np.int64),
        backward_need=np.maximum(during, left[stage_of] + held).astype(np.int64),
        released=released,
        loss_need=chain.activation[-1] + chain.loss_temp,
    )


def _check_need(activation: Ints, scratch: Ints) -> Ints:
    length = len(scratch)
    out = activation[1:] + scratch
    need = np.zeros((length + 1, length + 1), np.int64)
    for i in range(length):
        kept = activation[i:length].copy()
        kept[0] = 0
        need[i, i + 1 :] = np.maximum.accumulate(kept + out[i:])
    return need


def least_memory(costs: Costs) -> Ints:
    """Return the least bytes in which the backwards of stages l … i can run: [2, L+1, L+1], by (state, i, l)."""
    length = len(costs.activation) - 1
    kernels, _ = kernels_for("rotor_solver.persistent.interval_kernels", 1e-5 * length**2)
    found: Ints = kernels.least_memory(costs)
    return found


def least_choice(costs: Costs, least: Ints, state: int, i: int, last: int) -> int:
    """Return the code of a choice for [i, last], i < L, that fits in the interval's least[state, i, last] bytes."""
    row = 0 if last == len(costs.activation) - 1 else 1
    enough = int(least[state, i, last])
    for k in range(costs.first[i], costs.first[i + 1]):
        need = max(costs.base[last] + costs.forward_need[k], costs.backward_need[row, k] - costs.released[state, i])
        if last > i:
            need = max(need, costs.taken[state, k] + least[1, i + 1, last])
        if need <= enough:
            return int(k - costs.first[i])
    stop = slice(i + 1, last + 1)
    need = np.maximum(costs.base[last] + costs.check_need[i, stop], costs.activation[stop] + least[0, stop, last])
    fits = np.maximum(need, least[state, i, i:last]) <= enough
    return -(i + 1 + int(fits.argmax()))


# Of an interval that ends at the loss: bytes kept, bytes needed, the code of a choice, and the label of the next such
# interval. A tuple, not a class, since a chain may have thousands of labels.
Label = tuple[int, int, int, Any]


def least_kept(costs: Costs, least: Ints) -> list[Label]:
    """Return the Pareto front of sequences by the bytes that they keep up to the loss, and by their least memory.

    Neither counts a_0. The front of every interval that ends at the loss comes from those of the later ones; `least` is
    `least_memory(costs)`.
    """
    length = len(costs.activation) - 1
    found: list[list[list[Label]]] = [[[], []] for _ in range(length + 1)]  # by i and state
    found[length] = [[(0, int(costs.loss_need), 0, ())]] * 2
    for i in reversed(range(length)):
        found[i][0] = _front(costs, least, found, 0, i)
        same = costs.released[0, i] == costs.released[1, i]
        found[i][1] = found[i][0] if same else _front(costs, least, found, 1, i)
    return found[0][0]


def _front(costs: Costs, least: Ints, found: list[list[list[Label]]], state: int, i: int) -> list[Label]:
    length = len(costs.activation) - 1
    base = int(costs.base[length])
    labels: list[Label] = []
    for k in range(costs.first[i], costs.first[i + 1]):
        size = int(costs.taken[state, k])
        backward = int(costs.backward_need[0, k] - costs.released[state, i])
        most, choice = max(base + int(costs.forward_need[k]), backward), int(k - costs.first[i])
        labels += [(size + rest[0], max(most, size + rest[1]), choice, rest) for rest in found[i + 1][1]]
    for j in range(i + 1, length + 1):
        size = int(costs.activation[j])
        most = max(base + int(costs.check_need[i, j]), int(least[state, i, j - 1]))
        labels += [(size + rest[0], max(most, size + rest[1]), -j, rest) for rest in found[j][0]]
    kept: list[Label] = []
    labels.sort()
    for label in labels:
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept


# Function of (state, i, l) that returns the code of the choice for the interval [i, l], with a_i in this state
Choose = Callable[[int, int, int], int]


def operations_of(length: int, choose: Choose) -> list[Operation]:
    """Return the operations of a chain of `length` stages; calls `choose` for each interval when it begins to run."""

    def begun(state: int, i: int, last: int) -> list[Operation | tuple[int, int, int]]:
        if i > last:
            return []
        if i == length:
            return [Loss()]
        choice = choose(state, i, last)
        if choice >= 0:
            return [ForwardEnable(i, choice), (1, i + 1, last), Backward(i)]
        j = -choice
        forwards = (ForwardNograd(k) for k in range(i + 1, j))
        return [ForwardCheck(i), *forwards, (0, j, last), (state, i, j - 1)]

    return unfolded((0, 0, length), begun)


def unfolded(task: Task, begun: Callable[..., Several[Operation | Task]]) -> list[Operation]:
    """Return the operations of `task`; `begun(*task)` returns a task's operations and smaller tasks, in order."""
    operations: list[Operation] = []
    pending: list[Operation | Task] = [task]
    while pending:
        following = pending.pop()
        if isinstance(following, tuple):
            pending += reversed(begun(*following))
        else:
            operations.append(following)
    return operations
