"""The state of autocast at one moment, to be put back at another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Autocast:
    """The state of autocast for one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        """The state that holds where this is called."""
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def context(self, cache: bool) -> torch.autocast:
        """A region in this state. With `cache`, weights that are cast in it are kept until its end."""
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=cache)


def autocast_now(devices: Iterable[torch.device]) -> tuple[Autocast, ...]:
    """The state of autocast on the CPU, and on each kind of `devices`."""
    return tuple(map(Autocast.now, sorted({"cpu", *(device.type for device in devices)})))


@contextmanager
def restored_autocast(states: Iterable[Autocast], *, cache: bool) -> Iterator[None]:
    """A region in `states`. Without `cache`, weights that are cast in it are not kept."""
    with ExitStack() as stack:
        for state in states:
            # Off then and off now: there is nothing to put back, and this is entered for every run of every stage.
            if state.enabled or torch.is_autocast_enabled(state.device_type):
                stack.enter_context(state.context(cache=state.cache and cache))
        yield
