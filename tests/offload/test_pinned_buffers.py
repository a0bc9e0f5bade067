"""Pinned buffers of changing sizes: what one step had is used by the next, and what lies free is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rotor_py.errors import OffloadError
from rotor_py.offload.pinned_buffers import PinnedBuffer, PinnedBuffers

MIB = 2**20


class Counted(PinnedBuffers):
    """Buffers without memory; `pins` are the sizes that were pinned, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: list[int] = []

    def _pinned(self, size: int) -> torch.Tensor:
        self.pins.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")


def step(buffers: PinnedBuffers, sizes: Sequence[int]) -> None:
    """All are out at the loss, and come back from the last to the first."""
    held = [buffers.take(size) for size in sizes]
    assert buffers.taken_bytes >= sum(sizes)
    for each in reversed(held):
        buffers.give_back(each, None)
    assert buffers.taken_bytes == 0


@pytest.mark.parametrize("order", [1, -1])
def test_one_buffer_of_each_of_many_sizes_at_a_time_leaves_little_pinned(order: int) -> None:
    buffers = Counted()
    for size in range(1, 65)[::order]:
        step(buffers, [size * MIB])
    assert buffers.pinned_bytes <= 2 * 64 * MIB


def test_a_repeated_step_pins_nothing() -> None:
    buffers = Counted()
    for _ in range(3):
        step(buffers, [3 * MIB, 5 * MIB, 3 * MIB, 70_000])
    assert buffers.pins == [4 * MIB, 8 * MIB, 4 * MIB, MIB]


def test_a_shorter_batch_uses_what_a_longer_one_had() -> None:
    buffers = Counted()
    step(buffers, [8 * MIB] * 6)
    for length in (7, 5, 6, 8, 4):
        step(buffers, [length * MIB] * 6)
    assert buffers.pins == [8 * MIB] * 6


def test_a_small_one_does_not_take_the_place_of_a_much_larger_one() -> None:
    buffers = Counted()
    for _ in range(2):
        step(buffers, [64 * MIB, MIB])
        step(buffers, [MIB, 64 * MIB])
    assert buffers.pins == [64 * MIB, MIB]


def test_what_is_left_over_from_other_sizes_is_let_go_of() -> None:
    buffers = Counted()
    step(buffers, [MIB] * 32)
    step(buffers, [32 * MIB])
    step(buffers, [8 * MIB] * 4)
    assert buffers.pinned_bytes <= 64 * MIB
    buffers.clear()
    assert buffers.pinned_bytes == 0


STEPS = st.lists(st.lists(st.integers(1, 100 * MIB), min_size=1, max_size=6), min_size=1, max_size=8)


@given(STEPS)
def test_all_buffers_take_at_most_twice_what_was_asked_for_at_once(steps: list[list[int]]) -> None:
    buffers, most = Counted(), 0
    for sizes in steps:
        most = max(most, sum(max(MIB, 1 << (size - 1).bit_length()) for size in sizes))
        step(buffers, sizes)
        assert buffers.pinned_bytes <= 2 * most


@given(STEPS, st.lists(st.integers(1, 100 * MIB), min_size=1, max_size=6))
def test_whatever_was_before_a_repeated_step_soon_pins_nothing(steps: list[list[int]], sizes: list[int]) -> None:
    buffers = Counted()
    for each in steps:
        step(buffers, each)
    for _ in sizes:
        step(buffers, sizes)
    before = len(buffers.pins)
    step(buffers, sizes)
    assert len(buffers.pins) == before


def test_a_buffer_knows_of_the_copy_that_used_it_last() -> None:
    buffers, event = Counted(), object()
    first = buffers.take(MIB)
    buffers.give_back(first, event)
    again = buffers.take(MIB)
    assert again is first
    assert again.used is event


def test_what_cannot_be_pinned_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> PinnedBuffer:
        raise RuntimeError("CUDA error: out of memory")

    buffers = PinnedBuffers()
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OffloadError, match=r"the host cannot pin 4.19 MB \(4194304 bytes\) beside the 0 B \(0 bytes\)"):
        buffers.take(3 * MIB)
    assert buffers.taken_bytes == buffers.pinned_bytes == 0
    monkeypatch.undo()
    monkeypatch.setattr(PinnedBuffers, "_pinned", lambda _, size: torch.zeros(size, dtype=torch.uint8))
    step(buffers, [3 * MIB])
