"""The two ends of the scale: everything stored, and the least memory in which there is a plan at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from rotor_solver.arrays import ChainArrays
from rotor_solver.backtrack import operations_of
from rotor_solver.chain import Chain
from rotor_solver.errors import InfeasibleError
from rotor_solver.operations import Backward, ForwardEnable, Loss, Operation
from rotor_solver.sequence import Sequence
from rotor_solver.simulate import simulate


def store_all(chain: Chain) -> Sequence:
    """Run every stage once, with its fastest option, and keep everything. Nothing is faster."""
    best = [
        min(range(len(stage.options)), key=lambda k: (_seconds(chain, i, k), stage.options[k].saved))
        for i, stage in enumerate(chain.stages)
    ]
    forwards: list[Operation] = [ForwardEnable(i, k) for i, k in enumerate(best)]
    backwards = [Backward(i) for i in reversed(range(len(chain)))]
    sequence = Sequence([*forwards, Loss(), *backwards], "store-all")
    return Sequence(sequence, "store-all", lower_bound=simulate(chain, sequence).makespan)


def recompute_all(chain: Chain) -> Sequence:
    """A sequence with the least peak of all memory-persistent ones."""
    from rotor_solver import kernels

    arrays = ChainArrays.of(chain)
    _, choice = kernels.least_memory(*_memory_arguments(arrays))
    operations = operations_of(
        len(chain),
        0,
        lambda state, i, last, _: int(choice[state, i, last]),
        np.zeros((2, len(arrays.saved)), np.int64),
        np.zeros_like(arrays.activation),
        arrays.first,
    )
    return Sequence(operations, "recompute-all")


def min_bytes(chain: Chain) -> int:
    """The least limit for which there is a plan, a_0 counted: exact, by the program of `kernels.least_memory`."""
    from rotor_solver import kernels

    least, _ = kernels.least_memory(*_memory_arguments(ChainArrays.of(chain)))
    return chain.input_bytes + int(least[0, 0, len(chain)])


def _memory_arguments(arrays: ChainArrays) -> tuple[Any, ...]:
    return (
        arrays.activation,
        arrays.check_need,
        arrays.base,
        arrays.first,
        arrays.saved,
        arrays.forward_need,
        arrays.backward_need,
        arrays.released,
        arrays.loss_need,
    )


def _seconds(chain: Chain, stage: int, option: int) -> float:
    chosen = chain.stages[stage].options[option]
    return chosen.forward_time + chosen.backward_time


class StoreAll:
    """Everything is stored: plain training."""

    name = "store-all"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """`store_all(chain)`, or InfeasibleError if it does not fit."""
        return _within(chain, mem_limit, store_all(chain), "storing everything")


class RecomputeAll:
    """As much is computed again as is needed to reach the least possible peak."""

    name = "recompute-all"

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """`recompute_all(chain)`, or InfeasibleError if not even that fits."""
        return _within(chain, mem_limit, recompute_all(chain), "even computing as much as possible again")


def _within(chain: Chain, mem_limit: int, sequence: Sequence, what: str) -> Sequence:
    peak = simulate(chain, sequence).peak
    if peak > mem_limit:
        raise InfeasibleError(
            f"{what} needs {peak} bytes; the limit is {mem_limit}", min_bytes=peak, mem_limit=mem_limit
        )
    return sequence
