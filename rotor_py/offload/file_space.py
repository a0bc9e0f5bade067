"""Which bytes of a file are taken: ranges, handed out where they fit first."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

ALIGNMENT = 4096
"""Bytes: a range begins and ends at pages of the file, so that no two copies write to the same one."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """`size` bytes of a file from `start` on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class FileSpace:
    """The ranges of a file that are free, by where they start; `end` is where the last one that was taken ends.

    A step takes and gives back the same sizes in the same order as the one before, so that first fit finds for each the
    place that it had: the file does not grow from step to step.
    """

    end: int = 0
    taken: int = 0
    """Bytes that are taken now."""
    _free: list[Extent] = field(default_factory=list)

    def take(self, nbytes: int) -> Extent:
        """A range of `nbytes` or more that nobody has. Where none is free, the file has to grow up to `end`."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.taken += size
        for position, free in enumerate(self._free):
            if free.size == size:
                return self._free.pop(position)
            if free.size > size:
                self._free[position] = Extent(free.start + size, free.size - size)
                return Extent(free.start, size)
        found = Extent(self.end, size)
        self.end = found.end
        return found

    def give_back(self, extent: Extent) -> None:
        """Have a range free again, joined with its free neighbours."""
        self.taken -= extent.size
        insort(self._free, extent)
        joined: list[Extent] = []
        for each in self._free:
            if joined and joined[-1].end == each.start:
                joined[-1] = Extent(joined[-1].start, joined[-1].size + each.size)
            else:
                joined.append(each)
        if joined[-1].end == self.end:
            self.end = joined.pop().start
        self._free = joined
