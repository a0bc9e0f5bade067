"""Parse and open the tier for offloaded activations (`host` or `file:/path`), and measure its bandwidth."""

from __future__ import annotations

import math
import time
from contextlib import closing
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

# Share of the measured bandwidth that plans assume: training needs bandwidth, too. A guess: if too high, steps wait.
_SHARE = 0.8
_PIECE = 4 * 2**20  # bytes of one measured copy, so many that the time to start a copy does not matter
# The bandwidth is measured for 0.2 s, but with at most 64 copies. Guesses.
_SECONDS = 0.2
_MOST_PIECES = 64


def link_of(name: str, device: torch.device) -> Link:
    """Return the bandwidths that plans assume for tier `name`: `_SHARE` of the measured or simulated one."""
    found = prediction()
    rate = math.floor(_SHARE * (measured_bandwidth(name, device) if found is None else found.host_bandwidth))
    return Link(rate, rate)


@cache
def measured_bandwidth(name: str, device: torch.device) -> float:
    """Return the bytes per second of tier `name`, measured once, so that all plans of this process assume the same."""
    with closing(opened(name)) as tier:
        return measure_bandwidth(tier, device)


def measure_bandwidth(tier: Tier, device: torch.device) -> float:
    """Measure the bytes per second of `tier` in each direction, while copies run in both. Needs 12 MiB (3 pieces)."""
    source = torch.ones(_PIECE, dtype=torch.uint8, device=device).untyped_storage()
    warm = tier.move_out(source)  # the first copy starts threads, makes streams and allocates the file: do not time it
    warm.wait_out()
    warm.storage()
    del warm
    before: Moved = tier.move_out(source)
    before.wait_out()
    pieces = 0
    begun = time.perf_counter()
    # In each round, one piece is copied out while the previous one is copied back.
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
    """Return the tier name with an absolute path. Raises ValueError if there is no such tier or it cannot be opened."""
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
            message = f"use offload='host': a file's speed must be measured on the machine that has {found.name}"
            raise OffloadError(message, kind="device_elsewhere", name=found.name)
        return Tier()
    return HostTier() if name == "host" else FileTier(name.removeprefix(FILE))
