"""Blocks of the CUDA caching allocator, and the pools that keep those that are free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

MIN_BLOCK = 512
"""`kMinBlockSize`: every size is rounded up to a multiple of it."""
SMALL_SIZE = 2**20
"""`kSmallSize`: up to here, requests are small and have a pool of their own."""
SMALL_SEGMENT = 2 * 2**20
"""`kSmallBuffer`: what the small pool asks the driver for."""
LARGE_SEGMENT = 20 * 2**20
"""`kLargeBuffer`: what the large pool asks for if less than 10 MiB are wanted."""
MIN_LARGE_ALLOCATION = 10 * 2**20
"""`kMinLargeAlloc`: from here on, a request has a segment of its own."""
ROUND_LARGE = 2 * 2**20
"""`kRoundLarge`: to a multiple of it, such a segment is rounded up."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, between its neighbours. What is not mapped has addresses and no memory behind them."""

    address: int
    size: int
    pool: Pool
    allocated: bool = False
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is a segment, not a piece of one."""
        return self.previous is None and self.next is None

    def insert_after(self, other: Block) -> None:
        """Stand between `other` and its next."""
        self.previous, self.next = other, other.next
        if other.next is not None:
            other.next.previous = self
        other.next = self


@dataclass(slots=True, eq=False)
class Pool:
    """The free blocks for small or for large requests of one stream, ordered by size, then by address."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[int] = field(default_factory=list)
    """Addresses, in order."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """The free and the unmapped ones, by address."""

    def add(self, block: Block) -> None:
        self.blocks[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: Block) -> None:
        del self.blocks[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]

    def large_enough(self, size: int) -> Iterator[Block]:
        """The free blocks of at least `size` bytes, the smallest first; of equal ones, that of the lowest address."""
        return (self.blocks[address] for _, address in self.free[bisect_left(self.free, (size, -1)) :])

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """Make a free neighbour, which is in the pool, part of `block`, which is not."""
        if neighbour is None or neighbour.allocated or neighbour.mapped != block.mapped:
            return
        self.remove(neighbour)
        block.size += neighbour.size
        if neighbour is block.previous:
            block.address, block.previous = neighbour.address, neighbour.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block
