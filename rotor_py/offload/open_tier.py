"""Parse and open the tier for offloaded activations: `host`, or `file:/path`."""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path

import torch

from rotor_profiling.backends import prediction
from rotor_py.errors import OffloadError, kind_of
from rotor_py.offload import FILE, refuse_other_names
from rotor_py.offload.file_tier import FileTier
from rotor_py.offload.host_tier import HostTier
from rotor_py.offload.offload_saved import Moved, Tier
from rotor_solver import InvalidValueError
from rotor_solver.offload import Link

# Share of the measured bandwidth that plans use: training needs memory bandwidth, too. A guess; too high delays steps.
_SHARE = 0.8
_PIECE = 4 * 2**20  # bytes of one copy: large enough to hide the fixed cost of a copy
_SECONDS = 0.2
# Most copies of a measurement; arbitrary. A slow disk is measured for 0.2 s, a fast one with 256 MiB.
_MOST_PIECES = 64


def link_of(name: str, device: torch.device) -> Link:
    """Bandwidth from memory of `device` to a tier and back; of a simulated device, from the device table."""
    found = prediction()
    rate = math.floor(_SHARE * (measured_bandwidth(name, device) if found is None else found.host_bandwidth))
    return Link(rate, rate)


@cache
def measured_bandwidth(name: str, device: torch.device) -> float:
    """Measure once per process, so that plans for other batches or copies of a model agree."""
    tier = opened(name)
    try:
        return measure_bandwidth(tier, device)
    finally:
        tier.close()


def measure_bandwidth(tier: Tier, device: torch.device) -> float:
    """Return the bytes a second of `tier`, both ways at once. Needs the memory of three pieces of 4 MiB."""
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
    return pieces * _PIECE / (time.perf_counter() - begun)


def checked_name(name: str) -> str:
    """The tier name with an absolute path. Raises ValueError for an unknown or unavailable tier."""
    refuse_other_names(name)
    if name != "host":
        name = f"{FILE}{Path(name.removeprefix(FILE)).expanduser().absolute()}"
    try:
        opened(name).close()
    except OffloadError as error:
        raise InvalidValueError(f"offload={name!r}: {error}", kind=kind_of(error), name="offload") from None
    return name


def opened(name: str) -> Tier:
    if (found := prediction()) is not None:
        if name != "host":
            message = f"use offload='host': a file's speed is measured beside the device, and {found.name} is not here"
            raise OffloadError(message, kind="device_elsewhere", name=found.name)
        return Tier()
    return HostTier() if name == "host" else FileTier(name.removeprefix(FILE))
