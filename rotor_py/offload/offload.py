"""Where activations may go, as the user says it: `host`, or `file:/path`."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch

from rotor_profiling.instruments import prediction
from rotor_py.errors import OffloadError
from rotor_py.offload.bandwidth import measure_bandwidth
from rotor_py.offload.file_tier import FileTier
from rotor_py.offload.host_tier import HostTier
from rotor_py.offload.names import FILE, refuse_other_names
from rotor_py.offload.predicted_tier import PredictedTier
from rotor_py.offload.tier import Tier
from rotor_solver.moving import Link

_SHARE = 0.8
"""Of the bandwidth that is measured, the part that plans count on: training uses memory meanwhile. A guess."""


class Offload:
    """The tier of one model, which is opened when it is first used."""

    def __init__(self, name: str) -> None:
        """ValueError for what is no tier, and for one that cannot be had here."""
        self.name = checked_name(name)
        self._tier: Tier | None = None

    @property
    def tier(self) -> Tier:
        """The tier. OffloadError if it cannot be opened any more."""
        if self._tier is None:
            self._tier = _opened(self.name)
        return self._tier


def link_of(name: str, device: torch.device) -> Link:
    """How fast memory of `device` goes to a tier and back. OffloadError if it cannot go there.

    Of a device that is not there, it is what the table of devices says.
    """
    found = prediction()
    return measured_link(name, device) if found is None else _planned_with(found.host_bandwidth, found.host_bandwidth)


@cache
def measured_link(name: str, device: torch.device) -> Link:
    """Measured once: plans of one process, for other batches or copies of a model, are not to differ by that."""
    tier = _opened(name)
    try:
        found = measure_bandwidth(tier, device)
    finally:
        tier.close()
    return _planned_with(found.out, found.back)


def _planned_with(out: float, back: float) -> Link:
    return Link(math.floor(_SHARE * out), math.floor(_SHARE * back))


def checked_name(name: str) -> str:
    """The name of a tier, with its path made absolute. ValueError for what is none, or cannot be had here."""
    refuse_other_names(name)
    if name != "host":
        name = f"{FILE}{Path(name.removeprefix(FILE)).expanduser().absolute()}"
    try:
        _opened(name).close()
    except OffloadError as error:
        raise ValueError(f"offload={name!r}: {error}") from None
    return name


def _opened(name: str) -> Tier:
    if (found := prediction()) is not None:
        if name != "host":
            raise OffloadError(
                f"how fast a file is, is measured beside the device, and {found.name} is not here; use offload='host'"
            )
        return PredictedTier()
    return HostTier() if name == "host" else FileTier(name.removeprefix(FILE))
