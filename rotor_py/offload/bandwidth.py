"""How many bytes a second a tier takes and gives, while it does both."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from rotor_py.offload.tier import Moved, Tier

_PIECE = 4 * 2**20
"""Bytes of one copy: large enough that what a copy costs beside its bytes does not count."""
_SECONDS = 0.2
_MOST_PIECES = 64
"""Both ends of a measurement; arbitrary. A slow disk gets its two tenths of a second, a fast one 256 MiB."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, out and back, measured while copies went both ways."""

    out: float
    back: float


def measure_bandwidth(tier: Tier, device: torch.device) -> Bandwidth:
    """The bandwidth of `tier` for memory of `device`, both ways at once. OffloadError if a copy fails.

    Needs the memory of three pieces of 4 MiB.
    """
    source = torch.ones(_PIECE, dtype=torch.uint8, device=device).untyped_storage()
    warm = tier.move_out(source)  # the first copy makes threads and streams, and the first bytes of a file
    warm.wait_out()
    warm.storage()
    del warm
    before: Moved = tier.move_out(source)
    before.wait_out()
    pieces = 0
    begun = time.perf_counter()
    # In each round one piece leaves while the one before comes back: both ways take as long as the slower one.
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
