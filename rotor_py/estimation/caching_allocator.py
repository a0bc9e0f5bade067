"""Simulate PyTorch's CUDA caching allocator: how many bytes it reserves for a sequence of requests.

A program runs out of memory when the allocator's segments, not just its tensors, exceed the device's memory. Rules and
constants are those of `c10/cuda/CUDACachingAllocator.cpp`; comments name its constants.
"""

# Note [The allocator's rules]
#
#  1. Requests are rounded up to multiples of 512 bytes. The stream's small pool serves up to 1 MiB, the large one more.
#  2. The pool's smallest free block that fits serves the request; of equally large ones, that at the lowest address.
#  3. If no block is large enough, the driver allocates a segment: 2 MiB for the small pool; for the large pool, 20 MiB
#     if the request is below 10 MiB, else the request rounded up to a multiple of 2 MiB.
#  4. If the block exceeds the request by 512 bytes or more in the small pool, or more than 1 MiB in the large one, it
#     is split. Else the request takes the whole block: 12 MiB from a free block of 13 MiB take 13.
#  5. A freed block is merged with its free neighbours in the segment. Its memory stays reserved.
#  6. If the driver has no more memory, the allocator releases every wholly free segment, and asks the driver once more.
#  7. With expandable segments, each pool maps memory into a range of addresses instead of rule 3, in pages of 2 MiB in
#     the small pool, 20 MiB in the large. A remainder of 512 bytes or more is split off. In rule 2, a free block before
#     unmapped addresses counts with these, so that others are used first. In rule 6, wholly free pages are unmapped.
#
# Not simulated, as they are off by default: max_split_size_mb, roundup_power2_divisions, garbage_collection_threshold,
# and the private pools of CUDA graphs.

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from rotor_py.errors import DescribedError, InvalidValueError
from rotor_py.units import format_bytes

MIN_BLOCK = 512  # `kMinBlockSize`: requests are rounded up to multiples of these bytes
SMALL_SIZE = 2**20  # `kSmallSize`: bytes of the largest request that the small pool serves
SMALL_SEGMENT = 2 * 2**20  # `kSmallBuffer`: segment size of the small pool
LARGE_SEGMENT = 20 * 2**20  # `kLargeBuffer`: segment size of the large pool for requests below 10 MiB
MIN_LARGE_ALLOCATION = 10 * 2**20  # `kMinLargeAlloc`: bytes of the least request with a segment of its size
ROUND_LARGE = 2 * 2**20  # `kRoundLarge`: the size of such a segment is rounded up to a multiple of it


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, linked to the parts before and after it. An unmapped block has addresses but no memory."""

    address: int
    size: int
    pool: Pool
    allocated: bool = False
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None

    def split(self, size: int) -> Block:
        rest = Block(
            self.address + size, self.size - size, self.pool, mapped=self.mapped, previous=self, next=self.next
        )
        if self.next is not None:
            self.next.previous = rest
        self.size, self.next = size, rest
        return rest


@dataclass(slots=True, eq=False)
class Pool:
    """The free blocks of a stream for small or large requests; `free` has (size, address) of mapped ones, sorted."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)  # free and unmapped blocks by address

    def add(self, block: Block) -> None:
        self.blocks[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))

    def remove(self, block: Block) -> None:
        del self.blocks[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """Merge `neighbour` into `block`, which is not in the pool, if `neighbour` is free and mapped as `block` is."""
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


@dataclass(frozen=True, slots=True)
class Allocate:
    """Request for `size` bytes on a CUDA stream; `Free(key)` returns these bytes."""

    key: Hashable
    size: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    key: Hashable


Event = Allocate | Free


def most_bytes(events: Iterable[Event], beyond: int = 0) -> int:
    """Return by how many bytes allocations rise, at their peak, over what the first `beyond` of `events` leave."""
    sizes, now, before, most = dict[Hashable, int](), 0, 0, 0
    for number, event in enumerate(events, 1):
        if isinstance(event, Allocate):
            sizes[event.key] = -(-event.size // MIN_BLOCK) * MIN_BLOCK
            now += sizes[event.key]
        else:
            now -= sizes.pop(event.key)
        if number <= beyond:
            before = most = now
        most = max(most, now)
    return most - before


@dataclass(frozen=True, slots=True)
class Reserved:
    """Peaks in bytes, as `torch.cuda.max_memory_allocated` and `max_memory_reserved` would return them."""

    allocated_bytes: int
    reserved_bytes: int


class DeviceFullError(DescribedError, ValueError):
    """The device has too little memory for a new segment, even after all free segments are released."""

    def __init__(self, size: int, allocated: int, reserved: int, limit: int) -> None:
        super().__init__(
            f"try expandable segments, or a smaller batch: {format_bytes(size)} more do not fit {format_bytes(limit)}, "
            f"of which {format_bytes(reserved)} are reserved, {format_bytes(allocated)} of them allocated to tensors",
            kind="device_full", size=size, allocated=allocated, reserved=reserved, limit=limit,
        )  # fmt: skip


_ENDLESS = LARGE_SEGMENT * 2**26  # bytes of the address range of an expandable segment: more than any device has


def replay(events: Iterable[Event], *, expandable: bool = False, limit: int | None = None) -> Reserved:
    """Return the peaks of allocated and reserved bytes when an allocator gets the requests `events`.

    `limit` is the device's memory in bytes; None: unlimited. Raises DeviceFullError if the requests do not fit into it.
    """
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.key, event.size, event.stream)
        else:
            allocator.free(event.key)
    return allocator.peak


class CachingAllocator:
    """Simulates the allocator of a device with `limit` bytes (None: unlimited); `expandable`: expandable segments."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self._peak_allocated = self._peak_reserved = 0
        self._expandable = expandable
        self._limit = limit
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._held: dict[Hashable, Block | None] = {}
        self._next_address = 0

    @property
    def peak(self) -> Reserved:
        return Reserved(self._peak_allocated, self._peak_reserved)

    def allocate(self, key: Hashable, size: int, stream: int = 0) -> None:
        """Serve a request for `size` bytes by the Note's rules; `free(key)` returns them. Zero bytes take no block."""
        if key in self._held:
            message = f"{key!r} is allocated already; free it first"
            raise InvalidValueError(message, kind="allocated_twice", name=str(key))
        if size <= 0:
            self._held[key] = None
            return
        size = -(-size // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_SIZE
        pool = self._pools.setdefault((small, stream), Pool(small))
        block = self._best_fit(pool, size) or self._new(pool, size)
        pool.remove(block)
        left = block.size - size
        if left >= MIN_BLOCK if small or self._expandable else left > SMALL_SIZE:
            pool.add(block.split(size))
        block.allocated = True
        self._held[key] = block
        self.allocated_bytes += block.size
        self._peak_allocated = max(self._peak_allocated, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        if key not in self._held:
            raise InvalidValueError(f"{key!r} is not allocated", kind="not_allocated", name=str(key))
        block = self._held.pop(key)
        if block is None:
            return
        block.allocated = False
        self.allocated_bytes -= block.size
        self._put_back(block)

    def release_cached(self) -> None:
        """Return free segments or pages to the driver by the rules 6 and 7, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            for block in [pool.blocks[address] for _, address in pool.free]:
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:  # a whole segment
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        found, most = None, 0
        for free, address in pool.free[bisect_left(pool.free, (size, -1)) :]:
            block = pool.blocks[address]
            following = block.next if self._expandable else None
            room = free + (following.size if following is not None and not following.mapped else 0)
            if found is not None and room >= most:
                break
            found, most = block, room
        return found

    def _new(self, pool: Pool, size: int) -> Block:
        """Return a free block of new memory from the driver, by the rules 3, 6 and 7."""
        new = self._expanded if self._expandable else self._segment
        block = new(pool, size)
        if block is None:
            self.release_cached()
            block = new(pool, size)
        if block is None:
            assert self._limit is not None
            raise DeviceFullError(size, self.allocated_bytes, self.reserved_bytes, self._limit)
        return block

    def _segment(self, pool: Pool, size: int) -> Block | None:
        whole = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        if not pool.small and size >= MIN_LARGE_ALLOCATION:
            whole = -(-size // ROUND_LARGE) * ROUND_LARGE
        return self._new_block(pool, whole, mapped=True) if self._reserve(whole) else None

    def _new_block(self, pool: Pool, size: int, *, mapped: bool) -> Block:
        block = Block(self._next_address, size, pool, mapped=mapped)
        self._next_address += -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        pool.add(block)
        return block

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """Map memory into the first run of free or unmapped blocks of `size` bytes; return it, None over the limit."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        block = self._growing(pool, size)
        while not block.mapped or block.size < size:
            hole = block if not block.mapped else block.next
            assert hole is not None
            missing = size - (block.size if block.mapped else 0)
            mapped = min(hole.size, -(-missing // page) * page)
            if not self._reserve(mapped):
                return None
            pool.remove(hole)
            if mapped < hole.size:
                pool.add(hole.split(mapped))
            hole.mapped = True
            self._put_back(hole)
            block = hole
        return block

    def _reserve(self, size: int) -> bool:
        if self._limit is not None and self.reserved_bytes + size > self._limit:
            return False
        self.reserved_bytes += size
        self._peak_reserved = max(self._peak_reserved, self.reserved_bytes)
        return True

    def _growing(self, pool: Pool, size: int) -> Block:
        unmapped = (each for each in pool.blocks.values() if not each.mapped)
        block: Block | None
        for block in sorted(unmapped, key=lambda each: each.address):
            if block.previous is not None and not block.previous.allocated:
                block = block.previous
            start, room = block, 0
            while block is not None and not block.allocated and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return start
        return self._new_block(pool, _ENDLESS, mapped=False)

    def _unmap(self, block: Block) -> None:
        pool = block.pool
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            return
        pool.remove(block)
        if block.address + block.size > last:
            pool.add(block.split(last - block.address))
        if first > block.address:
            front, block = block, block.split(first - block.address)
            pool.add(front)
        block.mapped = False
        self.reserved_bytes -= block.size
        self._put_back(block)

    def _put_back(self, block: Block) -> None:
        block.pool.merge(block, block.previous)
        block.pool.merge(block, block.next)
        block.pool.add(block)
