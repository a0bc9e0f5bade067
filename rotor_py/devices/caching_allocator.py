"""The CUDA caching allocator, simulated: what it reserves for a sequence of requests, beyond what they take together.

A program runs out of memory when segments are more than the device has, not when tensors are. The rules are those of
`c10/cuda/CUDACachingAllocator.cpp`, whose names stand beside the constants in blocks.py.
"""

# Note [The allocator's rules]
# 1. A size is rounded up to 512 bytes. Up to 1 MiB it is for the small pool of its stream, else for the large one.
# 2. The smallest free block of the pool that is large enough serves it; of equal ones, that of the lowest address.
# 3. Else the driver gives a segment: 2 MiB for the small pool; for the large one 20 MiB if less than 10 MiB are wanted,
#    and from there on the size, rounded up to 2 MiB.
# 4. A block is split if 512 bytes or more are left in the small pool, or more than 1 MiB in the large one. What is not
#    split off is counted as allocated. For example: 12 MiB of a free block of 13 MiB take all 13.
# 5. What is freed becomes one block with the free neighbours of its segment, and stays reserved.
# 6. If the driver has no more, every segment that is free as a whole is given back, and the driver is asked once more.
# 7. Expandable segments: each pool has one range of addresses, and memory is mapped at its end, 2 MiB at a time for the
#    small pool and 20 MiB for the large. Any remainder of 512 bytes is split off. A block that can grow into unmapped
#    addresses counts as large as it can grow when the best one is looked for, so that others are used up first. If the
#    driver has no more, whole pages of free blocks are unmapped.
# Not simulated, as they are off by default: max_split_size_mb, roundup_power2_divisions, garbage_collection_threshold,
# and the private pools of CUDA graphs.

from __future__ import annotations

from collections.abc import Hashable, Iterable

from rotor_py.devices.blocks import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE_ALLOCATION,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
    Block,
    Pool,
)
from rotor_py.devices.requests import Allocate, DeviceFullError, Event, Reserved
from rotor_py.errors import InvalidValueError

_ENDLESS = LARGE_SEGMENT * 2**26
"""Addresses of an expandable segment. PyTorch takes an eighth more than the device has; nobody reaches either end."""


def replay(events: Iterable[Event], *, expandable: bool = False, limit: int | None = None) -> Reserved:
    """What the allocator has allocated and reserved at most while `events` happen in order.

    DeviceFullError if they do not fit `limit` bytes; None is a device without end.
    """
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.key, event.size, event.stream)
        else:
            allocator.free(event.key)
    return allocator.peak


class CachingAllocator:
    """The allocator of one device. `expandable` is PYTORCH_CUDA_ALLOC_CONF's expandable_segments:True."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._expandable = expandable
        self._limit = limit
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._held: dict[Hashable, Block | None] = {}
        self._next_address = 0

    @property
    def peak(self) -> Reserved:
        """The most that there was of each so far."""
        return Reserved(self._peak_allocated, self._peak_reserved)

    def allocate(self, key: Hashable, size: int, stream: int = 0) -> None:
        """Rules 1 to 4. Nothing is allocated for zero bytes."""
        if key in self._held:
            raise InvalidValueError(
                f"{key!r} is allocated already; free it first, or call this one something else",
                kind="allocated_twice",
                name=str(key),
            )
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
            rest = Block(block.address + size, left, pool)
            rest.insert_after(block)
            block.size = size
            pool.add(rest)
        block.allocated = True
        self._held[key] = block
        self.allocated_bytes += block.size
        self._peak_allocated = max(self._peak_allocated, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        """Rule 5."""
        if key not in self._held:
            raise InvalidValueError(f"{key!r} is not allocated", kind="not_allocated", name=str(key))
        block = self._held.pop(key)
        if block is None:
            return
        block.allocated = False
        self.allocated_bytes -= block.size
        self._put_back(block)

    def release_cached(self) -> None:
        """Rule 6, and the end of rule 7: what `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            for block in [pool.blocks[address] for _, address in pool.free]:
                if self._expandable:
                    self._unmap(block)
                elif block.whole:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        found: Block | None = None
        for block in pool.large_enough(size):
            if found is not None and _room(block) >= _room(found):
                break
            found = block
            if not self._expandable:
                break
        return found

    def _new(self, pool: Pool, size: int) -> Block:
        """A free block with memory that the pool did not have: rules 3, 6 and 7."""
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
        if not self._reserve(whole):
            return None
        block = Block(self._addresses(whole), whole, pool)
        pool.add(block)
        return block

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """Free and unmapped neighbours, the first that have addresses enough, mapped as far as needed."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        block = self._growing(pool, size)
        while not block.mapped or block.size < size:
            hole = block if not block.mapped else block.next
            assert hole is not None
            missing = size - (block.size if block.mapped else 0)
            wanted = min(hole.size, -(-missing // page) * page)
            if not self._reserve(wanted):
                return None
            block = self._map(pool, hole, wanted)
        return block

    def _reserve(self, size: int) -> bool:
        if self._limit is not None and self.reserved_bytes + size > self._limit:
            return False
        self.reserved_bytes += size
        self._peak_reserved = max(self._peak_reserved, self.reserved_bytes)
        return True

    def _addresses(self, size: int) -> int:
        start = self._next_address
        self._next_address += -(-size // LARGE_SEGMENT) * LARGE_SEGMENT
        return start

    def _growing(self, pool: Pool, size: int) -> Block:
        for address in pool.unmapped:
            block: Block | None = pool.blocks[address]
            assert block is not None
            if block.previous is not None and not block.previous.allocated:
                block = block.previous
            start, room = block, 0
            while block is not None and not block.allocated and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return start
        hole = Block(self._addresses(_ENDLESS), _ENDLESS, pool, mapped=False)
        pool.add(hole)
        return hole

    def _map(self, pool: Pool, hole: Block, size: int) -> Block:
        pool.remove(hole)
        if size < hole.size:
            rest = Block(hole.address + size, hole.size - size, pool, mapped=False)
            rest.insert_after(hole)
            hole.size = size
            pool.add(rest)
        hole.mapped = True
        self._put_back(hole)
        return hole

    def _unmap(self, block: Block) -> None:
        pool = block.pool
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            return
        pool.remove(block)
        end = block.address + block.size
        if end > last:
            after = Block(last, end - last, pool)
            after.insert_after(block)
            pool.add(after)
        middle = block
        if first > block.address:
            middle = Block(first, last - first, pool)
            middle.insert_after(block)
            block.size = first - block.address
            pool.add(block)
        middle.size, middle.mapped = last - first, False
        self.reserved_bytes -= middle.size
        self._put_back(middle)

    def _put_back(self, block: Block) -> None:
        block.pool.merge(block, block.previous)
        block.pool.merge(block, block.next)
        block.pool.add(block)


def _room(block: Block) -> int:
    """How large a block of an expandable segment can become."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
