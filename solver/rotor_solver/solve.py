"""Find the sequence of operations for a training step of a chain, by an algorithm that is selected by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rotor_solver.chain import Chain, check_chain
from rotor_solver.classic import GriewankHeterogeneous, Periodic, Revolve, Sqrt
from rotor_solver.described_error import InvalidValueError, bytes_of_limit, check_count, check_type, within_memory
from rotor_solver.floating import Floating
from rotor_solver.persistent import Persistent
from rotor_solver.persistent.recurrence import WORK
from rotor_solver.segments import RecomputeAll, StoreAll
from rotor_solver.sequence import Sequence


class Algorithm(Protocol):
    """Interface of the algorithms that find a sequence of operations within a memory limit."""

    @property
    def name(self) -> str:
        """Name of the algorithm in `Sequence.algorithm` and reports."""

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return a sequence whose simulated peak is at most `mem_limit` bytes, the chain's input included.

        Raises InfeasibleError if the algorithm has no such sequence.
        """


ALGORITHMS: dict[str, Callable[[int], Algorithm]] = {
    "persistent": Persistent,
    "floating": Floating,
    "griewank-heterogeneous": GriewankHeterogeneous,
    "griewank-heterogeneous-attached": lambda slots: GriewankHeterogeneous(slots, attached=True),
    "revolve": lambda slots: Revolve(),
    "sqrt": lambda slots: Sqrt(),
    "periodic": lambda slots: Periodic(),
    "store-all": lambda slots: StoreAll(),
    "recompute-all": lambda slots: RecomputeAll(),
}
"""Functions that make an algorithm, by its name; their argument is the number of slots that divide its memory."""


@within_memory
def solve(
    chain: Chain, mem_limit: float, algorithm: str | Algorithm = "persistent", slots: int = 500, work: float = WORK
) -> Sequence:
    """Return the fastest sequence that `algorithm` finds for `chain` in `mem_limit` bytes, the chain's input included.

    `algorithm` is a name in `ALGORITHMS`, or an object with the interface `Algorithm`. The dynamic programs divide the
    limit into `slots` or more units of memory; `work` limits how long "persistent" refines (see `Persistent`). Raises
    InfeasibleError if no sequence fits; its `min_bytes` is the least limit at which the algorithm has one. Raises
    ValueError if the limit is not a number of bytes, if the algorithm is unknown, if its table is too large, or if
    `slots` < 1 or `work` < 0. Raises InvalidTypeError if `chain` or `algorithm` has the wrong type.
    """
    check_chain(chain)
    limit = bytes_of_limit(mem_limit)
    check_count(slots, "slots")
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            message = f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}"
            raise InvalidValueError(message, kind="unknown_value", name="algorithm")
        algorithm = ALGORITHMS[algorithm](slots)
        if isinstance(algorithm, Persistent):
            algorithm = replace(algorithm, work=work)
    elif not callable(getattr(algorithm, "solve", None)) or isinstance(algorithm, type):
        check_type(algorithm, str, "algorithm", f"use one of {', '.join(ALGORITHMS)}")
    return algorithm.solve(chain, limit)
