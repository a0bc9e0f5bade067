"""Parse and open the tier for offloaded activations: `host`, or `file:/path`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from rotor_profiling.backends import prediction
from rotor_py.errors import OffloadError, kind_of
from rotor_py.offload import FILE, refuse_other_names
from rotor_py.offload.file_tier import FileTier
from rotor_py.offload.host_tier import HostTier
from rotor_py.offload.tier import Moved, Tier
from rotor_solver import InvalidValueError
from rotor_solver.moving import Link

_SHARE = 0.8
"""Share of the measured bandwidth that plans use: training needs memory bandwidth, too. A guess; too high delays steps.
"""
_PIECE = 4 * 2**20
"""Bytes of one copy: large enough to hide the fixed cost of a copy."""
_SECONDS = 0.2
_MOST_PIECES = 64
"""Most copies of a measurement; arbitrary. A slow disk is measured for 0.2 s, a fast one with 256 MiB."""


class Offload:
    """The tier of one model, opened at first use."""

    def __init__(self, name: str) -> None:
        """Raise ValueError for an unknown or unavailable tier."""
        self.name = checked_name(name)
        self._tier: Tier | None = None

    @property
    def tier(self) -> Tier:
        """The tier. Raises OffloadError if it can no longer be opened."""
        if self._tier is None:
            self._tier = _opened(self.name)
        return self._tier


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second out and back, measured with copies in both directions."""

    out: float
    back: float


def link_of(name: str, device: torch.device) -> Link:
    """Bandwidth from memory of `device` to a tier and back; of a simulated device, from the device table."""
    found = prediction()
    return measured_link(name, device) if found is None else _planned_with(found.host_bandwidth, found.host_bandwidth)


@cache
def measured_link(name: str, device: torch.device) -> Link:
    """Measure once per process, so that plans for other batches or copies of a model agree."""
    tier = _opened(name)
    try:
        found = measure_bandwidth(tier, device)
    finally:
        tier.close()
    return _planned_with(found.out, found.back)


def _planned_with(out: float, back: float) -> Link:
    return Link(math.floor(_SHARE * out), math.floor(_SHARE * back))


def measure_bandwidth(tier: Tier, device: torch.device) -> Bandwidth:
    """Measure the bandwidth of `tier`, both directions at once. Needs the memory of three pieces of 4 MiB."""
    source = torch.ones(_PIECE, dtype=torch.uint8, device=device).untyped_storage()
    warm = tier.move_out(source)  # the first copy makes threads, streams and the start of the file
    warm.wait_out()
    warm.storage()
    del warm
    before: Moved = tier.move_out(source)
    before.wait_out()
    pieces = 0
    begun = time.perf_counter()
    # In each round one piece leaves while the previous returns: both directions take as long as the slower one.
    while pieces < _MOST_PIECES and (pieces == 0 or time.perf_counter() - begun < _SECONDS):
        leaving = tier.move_out(source)
        before.fetch()
        leaving.wait_out()
        before.storage()
        before = leaving
        pieces += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rate = pieces * _PIECE / (time.perf_counter() - begun)
    return Bandwidth(rate, rate)


def checked_name(name: str) -> str:
    """The tier name with an absolute path. Raises ValueError for an unknown or unavailable tier."""
    refuse_other_names(name)
    if name != "host":
        name = f"{FILE}{Path(name.removeprefix(FILE)).expanduser().absolute()}"
    try:
        _opened(name).close()
    except OffloadError as error:
        raise InvalidValueError(f"offload={name!r}: {error}", kind=kind_of(error), name="offload") from None
    return name


def _opened(name: str) -> Tier:
    if (found := prediction()) is not None:
        if name != "host":
            raise OffloadError(
                f"how fast a file is, is measured beside the device, and {found.name} is not here; use offload='host'",
                kind="device_elsewhere",
                name=found.name,
            )
        return PredictedTier()
    return HostTier() if name == "host" else FileTier(name.removeprefix(FILE))


class PredictedTier(Tier):
    """A tier for fake tensors."""

    name = "host"
    moved_bytes = 0
    held_bytes = 0

    def reserve(self, nbytes: int) -> None:
        """Always succeeds: the host is unknown."""

    def move_out(self, storage: torch.UntypedStorage) -> Moved:
        """Return a storage that exists until its copy is waited for."""
        self.moved_bytes += storage.nbytes()
        return _Moved(storage)

    def close(self) -> None:
        """Do nothing."""


class _Moved(Moved):
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._nbytes = storage.nbytes()
        self._storage: torch.UntypedStorage | None = storage

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def wait_out(self) -> None:
        self._storage = None

    def fetch(self) -> None:
        if self._storage is None:
            self._storage = torch.empty(self._nbytes, dtype=torch.uint8).untyped_storage()

    def storage(self) -> torch.UntypedStorage:
        self.fetch()
        assert self._storage is not None
        return self._storage
