"""The tiers of pinned memory and of files: bytes come back as they left, whatever the order and whatever goes wrong."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_profiling import memory_meter
from rotor_py import host_memory
from rotor_py.errors import OffloadError
from rotor_py.offload.file_tier import ALIGNMENT, FileSpace, FileTier
from rotor_py.offload.host_tier import HostTier, MovedToHost, PinnedBuffers
from rotor_py.offload.offload_saved import Moved
from rotor_py.offload.open_tier import measure_bandwidth
from tests.checkpointable.steps import CPU
from tests.fields import raises
from tests.offload.tiers import held

NBYTES, MIB = 4096, 2**20

# Streams of CUDA without CUDA: what is given to them runs late, in any order that their waits allow.


class Stream:
    def __init__(self) -> None:
        self.work, self.done = list[Callable[[], object]](), 0
        self.give = self.wait_event = self.work.append

    def record_event(self) -> Callable[[], object]:
        """What is to be done until the event is over: as many pieces of this stream's work as it has now."""
        return partial(self.run, len(self.work))

    def wait_stream(self, other: Stream) -> None:
        self.work.append(other.record_event())

    def run(self, position: int | None = None) -> None:
        """Do the work up to `position`, all of it by default, and of other streams only what it waits for."""
        while self.done < (len(self.work) if position is None else position):
            self.done += 1
            self.work[self.done - 1]()


class Device:
    """The stream that trains, and whichever is the current one."""

    def __init__(self) -> None:
        self.training, self.out, self.back = Stream(), Stream(), Stream()
        self.current = self.training

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Memory of the CPU that is used as if kernels and copies ran in streams."""
    found, copy, empty = Device(), torch.Tensor.copy_, torch.empty

    def later(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        found.current.give(lambda: copy(self, source))  # type: ignore[arg-type, return-value] # nobody reads it
        return self

    def used_before(*size: int, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        if made.numel():
            found.current.give(partial(made.fill_, 99))  # the last kernel of whoever had the memory before
        return made

    monkeypatch.setattr(torch, "empty", used_before)
    monkeypatch.setattr(torch.Tensor, "copy_", later)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.inside)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(HostTier, "streams", lambda *_: (found.out, found.back))
    monkeypatch.setattr(PinnedBuffers, "_pinned", lambda self, size: torch.zeros(size, dtype=torch.uint8))
    return found


def memory(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def written(device: Device, value: int, *storages: torch.UntypedStorage) -> torch.UntypedStorage:
    """New memory, or these, into which a kernel of the current stream writes `value`."""
    storages = storages or (torch.zeros(NBYTES, dtype=torch.uint8).untyped_storage(),)
    for storage in storages:
        device.current.give(partial(memory(storage).fill_, value))
    return storages[0]


def read(device: Device, storage: torch.UntypedStorage, into: list[int]) -> None:
    device.current.give(lambda: into.append(int(memory(storage).unique().item())))


ORDERS = list(permutations(("training", "out", "back")))


def run(device: Device, order: tuple[str, ...]) -> None:
    for name in 2 * order:
        getattr(device, name).run()


@pytest.mark.parametrize("order", ORDERS)
def test_bytes_come_back_in_whatever_order_streams_run(device: Device, order: tuple[str, ...]) -> None:
    tier, found = HostTier(), list[int]()
    for value in (1, 2, 3):  # the second and third in buffers that were used before
        storages = [written(device, value), written(device, 10 * value)]
        moved = [MovedToHost(tier, storage) for storage in storages]
        for each in moved:
            each.wait_out()
        written(device, 99, *storages)  # by somebody else, to whom the allocator has given the memory
        for each in reversed(moved):
            each.fetch()
        for each in moved:
            back = each.storage()
            read(device, back, found)
            written(device, 99, back)  # let go of when it was read
        del moved, each
        if value == 2:
            run(device, order)
    run(device, order)
    assert found == [1, 10, 2, 20, 3, 30]
    assert held(tier) == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("after", ["leaving", "away", "fetched"])
def test_memory_that_nobody_wants_any_more_harms_nobody(device: Device, order: tuple[str, ...], after: str) -> None:
    tier, found = HostTier(), list[int]()
    storage = written(device, 1)
    moved: Any = MovedToHost(tier, storage)
    taken = [storage]
    if after != "leaving":
        moved.wait_out()
    if after == "fetched":
        moved.fetch()
        taken.append(moved._storage)
    del moved
    assert held(tier) == 0
    written(device, 7, *taken)  # the next owner writes, and reads what it has written
    another = MovedToHost(tier, written(device, 5))  # in the same buffer
    another.wait_out()
    read(device, another.storage(), found)
    for each in taken:
        read(device, each, found)
    run(device, order)
    assert found == [5, *[7 for _ in taken]]


@pytest.mark.parametrize("first", [0, 3, 5])
def test_each_of_many_training_streams_finds_the_right_bytes(device: Device, first: int) -> None:
    tier, found = HostTier(), list[int]()
    forward, backward, reader, later = (Stream() for _ in range(4))
    with device.inside(forward):
        moved = MovedToHost(tier, written(device, 1))
        moved.wait_out()
    with device.inside(backward):
        moved.fetch()
    with device.inside(reader):
        read(device, moved.storage(), found)
    with device.inside(later):
        another = MovedToHost(tier, written(device, 5))  # in the same buffer
    assert held(tier) > 0
    streams = [forward, backward, reader, later, device.out, device.back]
    for stream in [*streams[first:], *streams[:first]]:
        stream.run()
    assert found == [1]
    del another


def test_memory_that_has_not_left_stays(device: Device) -> None:
    tier, storage = HostTier(), written(device, 1)
    moved = MovedToHost(tier, storage)
    moved.fetch()
    moved.wait_out()
    assert moved.storage().data_ptr() == storage.data_ptr()
    assert held(tier) == 0


def test_a_host_with_too_little_memory_is_refused_when_the_plan_is_made(device, monkeypatch) -> None:
    tier = HostTier()
    with raises(OffloadError, "other_device", name="cpu"):
        tier.move_out(torch.empty(4).untyped_storage())
    monkeypatch.setattr("rotor_py.offload.host_tier.available_host_bytes", lambda: 10_000_000)
    tier.reserve(10_000_000)
    with raises(OffloadError, "host_full", nbytes=12_000_000, available=10_000_000):
        tier.reserve(12_000_000)
    tier.buffers.take(2_000_000)
    tier.reserve(12_000_000)  # what is pinned already is the plan's


@pytest.mark.gpu
def test_a_gpu_gets_its_bytes_back_and_its_memory_meanwhile(cuda) -> None:
    tier = HostTier()
    for value in range(5):
        tensor = torch.randn(4 * 2**20, device=cuda) + value
        expected, before = tensor.clone(), torch.cuda.memory_allocated(cuda)
        moved = tier.move_out(tensor.untyped_storage())
        del tensor
        moved.wait_out()
        assert before - torch.cuda.memory_allocated(cuda) >= 4 * 4 * 2**20
        torch.full((4 * 2**20,), -1.0, device=cuda)  # in the same memory
        moved.fetch()
        assert torch.equal(torch.empty(0, device=cuda).set_(moved.storage()), expected)  # type: ignore[call-overload] # untyped
        del moved
    assert held(tier) == 0


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


STEPS = st.lists(st.lists(st.integers(1, 100 * MIB), min_size=1, max_size=6), min_size=1, max_size=8)


@given(STEPS, st.lists(st.integers(1, 100 * MIB), min_size=1, max_size=6))
def test_buffers_take_at_most_twice_what_was_asked_for_at_once_and_repeated_steps_pin_nothing(steps, repeated) -> None:
    buffers, most = Counted(), 0
    for sizes in [*steps, *[repeated] * len(repeated)]:
        most = max(most, sum(max(MIB, 1 << (size - 1).bit_length()) for size in sizes))
        step(buffers, sizes)
        assert buffers.pinned_bytes <= 2 * most
    before = len(buffers.pins)
    step(buffers, repeated)
    assert len(buffers.pins) == before


def test_a_buffer_serves_smaller_batches_and_knows_of_the_copy_that_used_it_last() -> None:
    buffers, event = Counted(), object()
    for length in (8, 7, 5, 6, 8, 4):
        step(buffers, [length * MIB] * 6)
    assert buffers.pins == [8 * MIB] * 6
    first = buffers.take(MIB)
    buffers.give_back(first, event)
    assert buffers.take(MIB) is first
    assert first.used is event


def test_what_cannot_be_pinned_is_said_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, refuse = PinnedBuffers(), Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(torch, "empty", refuse)
    with raises(OffloadError, "cannot_pin", nbytes=2**22):
        buffers.take(3 * MIB)
    assert buffers.taken_bytes == buffers.pinned_bytes == 0
    monkeypatch.undo()
    monkeypatch.setattr(PinnedBuffers, "_pinned", lambda _, size: torch.zeros(size, dtype=torch.uint8))
    step(buffers, [3 * MIB])


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ],
)
def test_memory_that_a_container_has_used_is_not_available(tmp_path, monkeypatch, limit, used, stat) -> None:
    monkeypatch.setattr(host_memory, "_GROUP", tmp_path)
    machine = host_memory.host_memory_bytes()
    (tmp_path / "memory").mkdir()
    for name, text in ((limit, "5000000"), (used, "4000000"), (stat, "anon 3500000\ninactive_file 500000\n")):
        (tmp_path / name).write_text(text)
    assert host_memory.host_memory_bytes() == 5_000_000
    assert host_memory.available_host_bytes() == 1_500_000
    (tmp_path / limit).write_text("max")
    assert host_memory.host_memory_bytes() == machine


def storage_of(nbytes: int) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def is_back(moved: Moved, nbytes: int) -> bool:
    return torch.equal(memory(moved.storage()), memory(storage_of(nbytes)))


def gone(tier: FileTier, nbytes: int) -> Moved:
    moved = tier.move_out(storage_of(nbytes))
    moved.wait_out()
    return moved


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes wait until it is set."""
    go, write = threading.Event(), os.pwrite

    def later(*args: object) -> int:
        assert go.wait(60)
        return write(*args)  # type: ignore[arg-type] # as they came

    monkeypatch.setattr(os, "pwrite", later)
    return go


def test_bytes_come_back_as_they_left_and_bandwidth_is_measured(tier: FileTier) -> None:
    sizes = [1, 4096, 100_001, 9 * 2**20 + 7]  # the last one in several calls of the system
    moved = [tier.move_out(storage_of(size)) for size in sizes]
    for each in moved:
        each.wait_out()
    assert held(tier) >= sum(sizes)
    for each in reversed(moved):
        each.fetch()
    assert all(map(is_back, moved, sizes))
    assert (held(tier), tier.moved_bytes) == (0, sum(sizes))
    assert measure_bandwidth(tier, CPU) > 0
    assert held(tier) == 0


def test_a_fetch_before_the_bytes_have_left_gives_the_same_memory(tier: FileTier, go: threading.Event) -> None:
    original = storage_of(50_000)
    moved = tier.move_out(original)
    moved.fetch()
    for _ in range(2):
        assert moved.storage().data_ptr() == original.data_ptr()
        moved.wait_out()  # waits for nothing, and lets go of nothing
    del moved
    assert held(tier) > 0  # a thread is still to write there
    go.set()
    assert is_back(gone(tier, 50_000), 50_000)
    assert held(tier) == 0


def test_memory_is_let_go_of_when_the_copy_was_waited_for(tier: FileTier) -> None:
    nbytes = 3 * 2**20
    with memory_meter(CPU) as meter:
        meter.mark("left")
        moved = tier.move_out(storage_of(nbytes))
        moved.wait_out()
        meter.mark("away")
        meter.mark("fetched")
        moved.fetch()
        back = moved.storage()
        meter.mark("read")
        del moved, back
    assert [meter.phases[name].end for name in ("left", "fetched", "read")] == [0, nbytes, 0]
    assert meter.phases["away"].peak == 0


def test_memory_of_a_dropped_handle_stays_until_the_copy_is_over(tier: FileTier, go: threading.Event) -> None:
    storage = storage_of(200_000)
    weak = StorageWeakRef(storage)
    moved = tier.move_out(storage)
    del moved, storage
    assert not weak.expired()
    go.set()
    while held(tier):
        time.sleep(0.001)
    assert weak.expired()


def test_there_is_never_a_file_to_see_and_the_folder_may_go(tmp_path: Path) -> None:
    before, others = descriptors(), set(threading.enumerate())  # other tests may have left models of theirs alive
    (folder := tmp_path / "one").mkdir()
    tier = FileTier(folder)
    moved = tier.move_out(storage_of(100_000))
    assert list(folder.iterdir()) == []
    folder.rmdir()
    moved.wait_out()
    assert is_back(moved, 100_000)
    del moved, tier  # without a word
    gc.collect()
    assert descriptors() == before
    for thread in set(threading.enumerate()) - others:
        thread.join(timeout=60)  # it is told to end, and nobody waits for it
        assert not thread.is_alive()


def test_a_full_disk_is_refused_and_nothing_is_broken(tier, tmp_path, monkeypatch) -> None:
    with raises(OffloadError, "no_space") as refused:
        tier.reserve(9 * 10**15)
    assert str(tmp_path) in str(refused.value)
    no_room = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", no_room)
        with raises(OffloadError, "no_space"):
            tier.move_out(storage_of(10_000))
        assert held(tier) == 0
    moved = gone(tier, 10_000)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", no_room)
        other = tier.move_out(storage_of(10_000))
        with raises(OffloadError, "no_space"):
            other.wait_out()
    assert is_back(moved, 10_000)
    assert is_back(other, 10_000)  # it has not left
    assert held(tier) == 0


def test_a_file_that_was_cut_short_is_told_and_no_half_is_given(tier: FileTier) -> None:
    moved = gone(tier, 300_000)
    os.truncate(tier._file.descriptor, 8192)
    for _ in range(2):
        with raises(OffloadError, "file_cut_short"):
            moved.storage()
    del moved
    assert held(tier) == 0


def test_ctrl_c_in_a_wait_breaks_nothing(tier: FileTier, go: threading.Event) -> None:
    moved = tier.move_out(storage_of(100_000))
    killer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        moved.wait_out()
    killer.join()
    assert held(tier) > 0
    go.set()
    moved.wait_out()
    assert is_back(moved, 100_000)
    assert held(tier) == 0


def test_a_closed_tier_says_so_and_folders_that_take_no_files_are_refused(tier: FileTier, tmp_path: Path) -> None:
    moved = gone(tier, 5000)
    tier.close()
    for use in (moved.storage, lambda: tier.move_out(storage_of(5000))):
        with raises(OffloadError, "file_closed"):
            use()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with raises(OffloadError, "no_file", name=str(folder)):
            FileTier(folder)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_no_byte_has_two_owners_and_all_come_back(seed: int) -> None:
    rng, space, mine = random.Random(seed), FileSpace(), []
    for _ in range(60):
        if mine and rng.random() < 0.45:
            space.give_back(mine.pop(rng.randrange(len(mine))))
        else:
            nbytes = rng.randint(1, 5 * ALIGNMENT)
            mine.append(space.take(nbytes))
            assert mine[-1][1] >= nbytes
        assert all(sum(one) <= other[0] for one, other in pairwise(sorted(mine)))
        assert space.end >= max(map(sum, mine), default=0)
        assert space.end - sum(space._free.sizes.values()) == sum(size for _, size in mine)
    for each in mine:
        space.give_back(each)
    assert (space.end, space._free.sizes) == (0, {})
