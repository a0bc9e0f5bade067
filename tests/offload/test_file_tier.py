"""The tier of files: bytes come back as they left, and nothing is left behind, whatever goes wrong."""

import errno
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_profiling import memory_meter
from rotor_py.errors import OffloadError
from rotor_py.offload.file_tier import ALIGNMENT, FileSpace, FileTier
from rotor_py.offload.offload_saved import Moved
from rotor_py.offload.open_tier import measure_bandwidth
from tests.fields import raises

CPU = torch.device("cpu")


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    found = FileTier(tmp_path)
    yield found
    found.close()


def storage_of(nbytes: int) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def is_back(moved: Moved, nbytes: int) -> bool:
    storages = moved.storage(), storage_of(nbytes)
    return torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(each) for each in storages))


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
    assert tier.held_bytes >= sum(sizes)
    for each in reversed(moved):
        each.fetch()
    assert all(map(is_back, moved, sizes))
    assert (tier.held_bytes, tier.moved_bytes) == (0, sum(sizes))
    assert measure_bandwidth(tier, CPU) > 0
    assert tier.held_bytes == 0


def test_a_fetch_before_the_bytes_have_left_gives_the_same_memory(tier: FileTier, go: threading.Event) -> None:
    original = storage_of(50_000)
    moved = tier.move_out(original)
    moved.fetch()
    for _ in range(2):
        assert moved.storage().data_ptr() == original.data_ptr()
        moved.wait_out()  # waits for nothing, and lets go of nothing
    del moved
    assert tier.held_bytes > 0  # a thread is still to write there
    go.set()
    assert is_back(gone(tier, 50_000), 50_000)
    assert tier.held_bytes == 0


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
    while tier.held_bytes:
        time.sleep(0.001)
    assert weak.expired()


def test_there_is_never_a_file_to_see(tmp_path: Path) -> None:
    before, others = descriptors(), set(threading.enumerate())  # other tests may have left models of theirs alive
    tier = FileTier(tmp_path)
    moved = tier.move_out(storage_of(100_000))
    assert list(tmp_path.iterdir()) == []
    moved.wait_out()
    assert list(tmp_path.iterdir()) == []
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
        assert tier.held_bytes == 0
    moved = gone(tier, 10_000)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", no_room)
        other = tier.move_out(storage_of(10_000))
        with raises(OffloadError, "no_space"):
            other.wait_out()
    assert is_back(moved, 10_000)
    assert is_back(other, 10_000)  # it has not left
    assert tier.held_bytes == 0


def test_a_file_that_was_cut_short_is_told_and_no_half_is_given(tier: FileTier) -> None:
    moved = gone(tier, 300_000)
    os.truncate(tier._file.descriptor, 8192)
    for _ in range(2):
        with raises(OffloadError, "file_cut_short"):
            moved.storage()
    del moved
    assert tier.held_bytes == 0


def test_ctrl_c_in_a_wait_breaks_nothing(tier: FileTier, go: threading.Event) -> None:
    moved = tier.move_out(storage_of(100_000))
    killer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        moved.wait_out()
    killer.join()
    assert tier.held_bytes > 0
    go.set()
    moved.wait_out()
    assert is_back(moved, 100_000)
    assert tier.held_bytes == 0


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
            assert mine[-1].size >= nbytes
        assert all(one.end <= other.start for one, other in pairwise(sorted(mine)))
        assert space.end >= max((each.end for each in mine), default=0)
        assert space.taken == sum(each.size for each in mine)
    for each in mine:
        space.give_back(each)
    assert (space.end, space.taken) == (0, 0)


def test_the_second_step_lies_where_the_first_one_did() -> None:
    space, steps = FileSpace(), []
    for _ in range(2):
        taken = [space.take(size) for size in (9000, 4096, 20000, 1)]
        steps.append([each.start for each in taken])
        for each in reversed(taken):
            space.give_back(each)
    assert steps == [[0, 3 * ALIGNMENT, 4 * ALIGNMENT, 9 * ALIGNMENT]] * 2
