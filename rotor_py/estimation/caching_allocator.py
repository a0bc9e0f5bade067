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

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from rotor_py.errors import DescribedError
from rotor_py.ranges import Ranges
from rotor_py.units import format_bytes

MIN_BLOCK = 512  # `kMinBlockSize`: requests are rounded up to multiples of these bytes
SMALL_SIZE = 2**20  # `kSmallSize`: bytes of the largest request that the small pool serves
SMALL_SEGMENT = 2 * 2**20  # `kSmallBuffer`: segment size of the small pool
LARGE_SEGMENT = 20 * 2**20  # `kLargeBuffer`: segment size of the large pool for requests below 10 MiB
MIN_LARGE_ALLOCATION = 10 * 2**20  # `kMinLargeAlloc`: bytes of the least request with a segment of its size
ROUND_LARGE = 2 * 2**20  # `kRoundLarge`: the size of such a segment is rounded up to a multiple of it


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of a stream for small or large requests: free blocks, and the `unmapped` rest of expandable segments."""

    small: bool
    free: Ranges = field(default_factory=Ranges)
    unmapped: Ranges = field(default_factory=Ranges)

    @property
    def page(self) -> int:
        """Bytes of a page of an expandable segment, and of another segment unless it is for one large request."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT


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
        self._held: dict[Hashable, tuple[Pool, int, int]] = {}  # pool, first address and size of each request's block
        self._segments: dict[int, int] = {}  # size of each segment by its first address; of expandable ones, endless
        self._next_address = 0

    @property
    def peak(self) -> Reserved:
        return Reserved(self._peak_allocated, self._peak_reserved)

    def allocate(self, key: Hashable, size: int, stream: int = 0) -> None:
        """Serve a request for `size` bytes by the Note's rules; `free(key)` returns them. Zero bytes take no block."""
        size = -(-size // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_SIZE
        pool = self._pools.setdefault((small, stream), Pool(small))
        start = 0
        if size:
            found = self._best_fit(pool, size)
            start = self._new(pool, size) if found is None else found
            left = pool.free.take(start) - size
            if left >= MIN_BLOCK if small or self._expandable else left > SMALL_SIZE:
                pool.free.add(start + size, left)
            else:
                size += left
        self._held[key] = pool, start, size
        self.allocated_bytes += size
        self._peak_allocated = max(self._peak_allocated, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        pool, start, size = self._held.pop(key)
        if size:
            self.allocated_bytes -= size
            pool.free.add(start, size)

    def release_cached(self) -> None:
        """Return free segments or pages to the driver by the rules 6 and 7, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            for size, start in pool.free.sorted.copy():
                if self._expandable:
                    self._unmap(pool, start, size)
                elif self._segments.get(start) == size:  # a whole segment
                    self.reserved_bytes -= pool.free.take(start)

    def _best_fit(self, pool: Pool, size: int) -> int | None:
        """Return the first address of the free block that serves a request, by the rules 2 and 7."""
        found, most = None, 0
        for free, start in pool.free.sorted[bisect_left(pool.free.sorted, (size, -1)) :]:
            room = free + pool.unmapped.sizes.get(start + free, 0)
            if found is not None and room >= most:
                break
            found, most = start, room
        return found

    def _new(self, pool: Pool, size: int) -> int:
        """Return the first address of a free block of new memory from the driver, by the rules 3, 6 and 7."""
        new = self._expanded if self._expandable else self._segment
        start = new(pool, size)
        if start is None:
            self.release_cached()
            start = new(pool, size)
        if start is None:
            assert self._limit is not None
            raise DeviceFullError(size, self.allocated_bytes, self.reserved_bytes, self._limit)
        return start

    def _segment(self, pool: Pool, size: int) -> int | None:
        large = not pool.small and size >= MIN_LARGE_ALLOCATION
        whole = -(-size // ROUND_LARGE) * ROUND_LARGE if large else pool.page
        return self._new_range(pool.free, whole) if self._reserve(whole) else None

    def _new_range(self, ranges: Ranges, size: int) -> int:
        start = self._next_address
        self._segments[start] = size
        self._next_address += (-(-size // LARGE_SEGMENT) + 1) * LARGE_SEGMENT  # a gap, as segments are not merged
        ranges.add(start, size)
        return start

    def _expanded(self, pool: Pool, size: int) -> int | None:
        """Map memory into the first run of free or unmapped ranges of `size` bytes; return it, None over the limit."""
        start = self._growing(pool, size)
        while (free := pool.free.sizes.get(start, 0)) < size:
            mapped = min(pool.unmapped.sizes[start + free], -(-(size - free) // pool.page) * pool.page)
            if not self._reserve(mapped):
                return None
            left = pool.unmapped.take(start + free) - mapped
            pool.free.add(start + free, mapped)
            if left:
                pool.unmapped.add(start + free + mapped, left)
        return start

    def _reserve(self, size: int) -> bool:
        if self._limit is not None and self.reserved_bytes + size > self._limit:
            return False
        self.reserved_bytes += size
        self._peak_reserved = max(self._peak_reserved, self.reserved_bytes)
        return True

    def _growing(self, pool: Pool, size: int) -> int:
        for unmapped in sorted(pool.unmapped.sizes):
            start = end = pool.free.starts.get(unmapped, unmapped)
            while end - start < size and (more := pool.free.sizes.get(end) or pool.unmapped.sizes.get(end)):
                end += more
            if end - start >= size:
                return start
        return self._new_range(pool.unmapped, _ENDLESS)

    def _unmap(self, pool: Pool, start: int, size: int) -> None:
        first, last = -(-start // pool.page) * pool.page, (start + size) // pool.page * pool.page
        if first < last:
            pool.free.take(start)
            for low, high, ranges in (
                (start, first, pool.free),
                (first, last, pool.unmapped),
                (last, start + size, pool.free),
            ):
                if low < high:
                    ranges.add(low, high - low)
            self.reserved_bytes -= last - first
