"""Solve a chain by any algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rotor_solver.chain import Chain
from rotor_solver.classic import GriewankHeterogeneous, Periodic, Revolve, Sqrt
from rotor_solver.described_error import InvalidValueError, bytes_of_limit, check_count
from rotor_solver.floating import Floating
from rotor_solver.persistent import Persistent
from rotor_solver.segments import RecomputeAll, StoreAll
from rotor_solver.sequence import Sequence


class Algorithm(Protocol):
    """An algorithm that finds a sequence within a limit."""

    @property
    def name(self) -> str:
        """The name by which `solve` and reports know it."""

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """Return a sequence whose simulated peak is at most `mem_limit` bytes, a_0 counted.

        Raises InfeasibleError if the algorithm has none.
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
"""All algorithms by name; each takes a number of slots."""


def solve(chain: Chain, mem_limit: float, algorithm: str | Algorithm = "persistent", slots: int = 500) -> Sequence:
    """Find a sequence for `chain` within `mem_limit` bytes, a_0 counted.

    `algorithm` is a name in `ALGORITHMS`, or an object with the interface `Algorithm`. Algorithms that divide memory
    into slots use at least `slots`. Raises InfeasibleError if nothing fits; its `min_bytes` is the least limit at which
    the algorithm works. Raises ValueError if the limit is not a number of bytes, if the algorithm is unknown or cannot
    take the chain, or if `slots` < 1.
    """
    limit = bytes_of_limit(mem_limit)
    check_count(slots, "slots")
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise InvalidValueError(
                f"there is no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}",
                kind="unknown_value",
                name="algorithm",
            )
        algorithm = ALGORITHMS[algorithm](slots)
    return algorithm.solve(chain, limit)
