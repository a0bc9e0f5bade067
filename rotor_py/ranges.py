"""Free ranges of addresses, for allocators of a file and of simulated devices."""

from __future__ import annotations

from bisect import bisect_left, insort


class Ranges:
    """Ranges of addresses that do not overlap; a range is merged with those that it touches."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # by the first address
        self.starts: dict[int, int] = {}  # by the address after the last one
        self.sorted: list[tuple[int, int]] = []  # (size, first address)

    def add(self, start: int, size: int) -> None:
        if start + size in self.sizes:
            size += self.take(start + size)
        if start in self.starts:
            start = self.starts[start]
            size += self.take(start)
        self.sizes[start], self.starts[start + size] = size, start
        insort(self.sorted, (size, start))

    def take(self, start: int) -> int:
        """Remove the range that begins at `start`; return its size."""
        size = self.sizes.pop(start)
        del self.starts[start + size], self.sorted[bisect_left(self.sorted, (size, start))]
        return size
