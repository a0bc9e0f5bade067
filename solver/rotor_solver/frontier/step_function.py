"""The trade-off between memory and time as a value: a step function from limits to makespans, with their sequences."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

from rotor_solver.limits import InfeasibleError, bytes_of_limit
from rotor_solver.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Frontier:
    """A step function: limits[k] bytes, a_0 counted, are enough for sequences[k], which takes makespans[k] seconds.

    Limits increase, makespans do not. No persistent sequence within limits[k] bytes takes less than lower_bounds[k]
    seconds. `stored` is the makespan of storing everything.
    """

    limits: tuple[int, ...]
    makespans: tuple[float, ...]
    lower_bounds: tuple[float, ...]
    sequences: tuple[Sequence, ...]
    stored: float

    def __len__(self) -> int:
        return len(self.limits)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.limits, self.makespans, strict=True))

    @property
    def gap(self) -> float:
        """By how much a makespan is longer than its bound, at most, as a ratio: 0.01 is a hundredth."""
        pairs = zip(self.makespans, self.lower_bounds, strict=True)
        return max((made / least - 1 for made, least in pairs if least), default=0.0)

    def sequence(self, mem_limit: float) -> Sequence:
        """The fastest sequence known within `mem_limit` bytes.

        Raises InfeasibleError below the first limit, and ValueError if `mem_limit` is not a number of bytes.
        """
        return self.sequences[self._position(mem_limit)]

    def makespan(self, mem_limit: float) -> float:
        """Seconds of `sequence(mem_limit)`, with the same errors."""
        return self.makespans[self._position(mem_limit)]

    def limit_for(self, overhead: float) -> int:
        """The first limit whose makespan is at most 1 + `overhead` times that of storing everything.

        Raises ValueError if no limit has such a makespan, or if `overhead` is not zero or more.
        """
        if isinstance(overhead, bool) or not isinstance(overhead, int | float) or not overhead >= 0:
            raise ValueError(f"overhead is {overhead!r}; it has to be zero or more: 0.1 for a tenth more time")
        for limit, made in self:
            if made <= self.stored * (1 + overhead):
                return limit
        raise ValueError(f"none of the {len(self)} limits keeps the overhead at {overhead}")

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw into a file (.svg, .png, .pdf) how much longer than storing everything a step takes at every limit.

        Raises ImportError if matplotlib is missing, and ValueError for a format that it does not know.
        """
        from rotor_solver.plot import draw

        draw(path, self.limits, [made / self.stored - 1 if self.stored else 0.0 for made in self.makespans])

    def _position(self, mem_limit: float) -> int:
        limit = bytes_of_limit(mem_limit)
        position = bisect.bisect_right(self.limits, limit) - 1
        if position < 0:
            least = self.limits[0] if self.limits else 0
            message = f"the least limit of the frontier is {least} bytes; the limit is {limit}"
            raise InfeasibleError(message, min_bytes=least, mem_limit=limit)
        return position
