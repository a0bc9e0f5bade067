"""The simulated caching allocator: PyTorch's rules one by one, a naive twin, and CUDA's own where it is."""

import os
import random
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotor_py.estimation import caching_allocator as blocks
from rotor_py.estimation.caching_allocator import Allocate, DeviceFullError, Event, Free, Reserved, replay
from tests.fields import raises

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB),  # more than 1 MiB is left: split
        (13 * MIB, 14 * MIB, 14 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_are_of_three_kinds(size: int, allocated: int, reserved: int) -> None:
    assert replay([Allocate("a", size)]) == Reserved(allocated, reserved)


def test_expandable_segments_grow_instead_of_fragmenting_and_their_end_is_the_last_to_be_used() -> None:
    # Each is freed before the next, slightly larger one.
    growing = [event for size in range(20, 200, 4) for event in (Allocate(size, size * MIB), Free(size))]
    assert replay(growing).reserved_bytes == sum(range(20, 200, 4)) * MIB
    assert replay(growing, expandable=True).reserved_bytes == 200 * MIB  # 196, by pages of 20
    # What the others do not split off.
    for size, reserved in ((7, 20), (8, 40)):
        both = [Allocate("a", 13 * MIB), Allocate("b", size * MIB)]
        assert replay(both, expandable=True) == Reserved((13 + size) * MIB, reserved * MIB)
    # Rule 7: the hole of 30 MiB before a block that is held serves, though the end, with 20 MiB that are mapped and
    # free, is a better fit as it is: it could become larger than any. Then 10 MiB of the hole are left: the end grows.
    events: list[Event] = [Allocate("a", 30 * MIB), Allocate("b", 30 * MIB), Allocate("c", 19 * MIB)]
    events += [Free("a"), Free("c"), Allocate("d", 20 * MIB), Allocate("e", 30 * MIB)]
    assert replay(events, expandable=True).reserved_bytes == 100 * MIB


def test_a_full_device_gives_back_whole_segments_or_pages_first_and_then_has_no_more() -> None:
    events = [Allocate("a", 30 * MIB, stream=0), Free("a"), Allocate("b", 30 * MIB, stream=1)]
    assert replay(events) == Reserved(30 * MIB, 60 * MIB), "streams share no blocks"
    parts: list[Event] = [Allocate("a", 20 * MIB), Free("a"), Allocate("b", 30 * MIB)]
    assert replay(parts, limit=50 * MIB) == Reserved(30 * MIB, 50 * MIB)
    assert replay(parts, limit=40 * MIB) == Reserved(30 * MIB, 30 * MIB)
    # Half of the first segment is in use, so none of it can be given back.
    held = [Allocate("a", 5 * MIB), Allocate("b", 30 * MIB)]
    with raises(DeviceFullError, "device_full", reserved=20 * MIB, allocated=5 * MIB):
        replay(held, limit=40 * MIB)
    # Of expandable segments, pages are unmapped.
    events = [Allocate("a", 60 * MIB), Allocate("b", 10 * MIB), Free("a"), Allocate("c", 20 * MIB, stream=1)]
    assert replay(events, expandable=True).reserved_bytes == 100 * MIB
    assert replay(events, expandable=True, limit=80 * MIB).reserved_bytes == 80 * MIB
    with pytest.raises(DeviceFullError):
        replay(events, expandable=True, limit=30 * MIB)


def test_constants_are_those_of_the_installed_pytorch() -> None:
    include = Path(torch.__file__).parent / "include" / "c10"
    headers = [include / "core" / "AllocatorConfig.h", include / "cuda" / "CUDAAllocatorConfig.h"]
    text = "".join(each.read_text() for each in headers if each.exists())
    names = {"kMinBlockSize": blocks.MIN_BLOCK, "kSmallSize": blocks.SMALL_SIZE, "kSmallBuffer": blocks.SMALL_SEGMENT}
    names |= {"kMinLargeAlloc": blocks.MIN_LARGE_ALLOCATION, "kRoundLarge": blocks.ROUND_LARGE}
    for name, value in names.items():
        if name in text:  # older releases have them in the .cpp alone
            assert f"{name} = {value};" in text


class Twin:
    """The same rules without order or neighbours: every segment is a list of [size, key or None]."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[Any]]]] = []

    def allocate(self, key: object, size: int) -> None:
        size = max(1, -(-size // 512)) * 512
        small = size <= MIB
        found = [
            (piece[0], number, place)
            for number, (kind, pieces) in enumerate(self.segments)
            for place, piece in enumerate(pieces)
            if kind == small and piece[1] is None and piece[0] >= size
        ]
        if not found:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[whole, None]]))
            found = [(whole, len(self.segments) - 1, 0)]
        _, number, place = min(found)
        pieces = self.segments[number][1]
        left = pieces[place][0] - size
        if left >= 512 if small else left > MIB:
            pieces[place : place + 1] = [[size, key], [left, None]]
        else:
            pieces[place][1] = key

    def free(self, key: object) -> None:
        for _, pieces in self.segments:
            for piece in pieces:
                if piece[1] == key:
                    piece[1] = None
            place = 0
            while place + 1 < len(pieces):
                if pieces[place][1] is None and pieces[place + 1][1] is None:
                    pieces[place][0] += pieces.pop(place + 1)[0]
                else:
                    place += 1

    @property
    def sizes(self) -> tuple[int, int]:
        every = [piece for _, pieces in self.segments for piece in pieces]
        return sum(size for size, key in every if key is not None), sum(size for size, _ in every)


STEPS = st.lists(st.one_of(st.integers(1, 30 * MIB), st.integers(1, 2 * MIB), st.just(-1)), max_size=60)
"""A size is allocated; -1 frees one that is held."""


@settings(max_examples=100, deadline=None)
@given(STEPS, st.randoms(use_true_random=False), st.booleans())
def test_it_does_what_the_naive_twin_does_gives_all_back_and_keeps_a_limit(steps, choose, expandable) -> None:
    allocator, twin, held, events = blocks.CachingAllocator(expandable=expandable), Twin(), [], []
    for key, size in enumerate(steps):
        if size > 0:
            held.append(key)
            events.append(Allocate(key, size))
            for each in (allocator, twin):
                each.allocate(key, size)
        elif held:
            freed = held.pop(choose.randrange(len(held)))
            events.append(Free(freed))
            for each in (allocator, twin):
                each.free(freed)
        assert allocator.reserved_bytes >= allocator.allocated_bytes
        assert expandable or (allocator.allocated_bytes, allocator.reserved_bytes) == twin.sizes
    peak = allocator.peak
    for key in held:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    assert allocator.peak == peak
    # Free blocks are merged again to whole segments, or whole pages.
    allocator.release_cached()
    assert allocator.reserved_bytes == 0
    assert replay(events, expandable=expandable, limit=peak.reserved_bytes) == peak
    with suppress(DeviceFullError):
        limit = peak.reserved_bytes // 2
        assert replay(events, expandable=expandable, limit=limit).reserved_bytes <= limit


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_cuda_reserves_what_is_simulated() -> None:
    """In a process of its own: libraries and other tests may hold memory of this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        for seed in range(5):
            process.submit(follow_cuda, seed).result()


def follow_cuda(seed: int) -> None:
    choose = random.Random(seed)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    expandable = "expandable_segments:True" in settings
    allocator, held = blocks.CachingAllocator(expandable=expandable), {}
    for number in range(300):
        if held and choose.random() < 0.45:
            key = choose.choice(sorted(held))
            del held[key]
            allocator.free(key)
        else:
            size = int(2 ** choose.uniform(5, 27))
            held[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
            allocator.allocate(number, size)
        assert torch.cuda.memory_allocated() == allocator.allocated_bytes
        assert torch.cuda.memory_reserved() == allocator.reserved_bytes
    assert sum(each["total_size"] for each in torch.cuda.memory_snapshot()) == allocator.reserved_bytes
