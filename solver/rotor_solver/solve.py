"""One function for all algorithms."""

from __future__ import annotations

from typing import Protocol

from rotor_solver.chain import Chain
from rotor_solver.ends import RecomputeAll, StoreAll
from rotor_solver.limits import bytes_of_limit
from rotor_solver.persistent import Persistent
from rotor_solver.sequence import Sequence


class Algorithm(Protocol):
    """A way to find a sequence within a limit."""

    @property
    def name(self) -> str:
        """The name by which `solve` and reports know it."""

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """A sequence whose simulated peak is at most `mem_limit` bytes, a_0 counted, or InfeasibleError."""


def solve(chain: Chain, mem_limit: int, algorithm: str | Algorithm = "persistent", slots: int = 500) -> Sequence:
    """Find a sequence for `chain` within `mem_limit` bytes, a_0 counted.

    `algorithm` is "persistent", "store-all", "recompute-all" or an object with the interface `Algorithm`; `slots` is
    how finely "persistent" divides memory to begin with. InfeasibleError, with `min_bytes`, if nothing fits;
    ValueError for a limit that is not a number of bytes, an unknown algorithm, or slots < 1.
    """
    limit = bytes_of_limit(mem_limit)
    by_name: dict[str, Algorithm] = {each.name: each for each in (Persistent(slots), StoreAll(), RecomputeAll())}
    if isinstance(algorithm, str):
        if algorithm not in by_name:
            raise ValueError(f"there is no algorithm {algorithm!r}; there are {', '.join(by_name)}")
        algorithm = by_name[algorithm]
    return algorithm.solve(chain, limit)
