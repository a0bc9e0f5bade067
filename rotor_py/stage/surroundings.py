"""What surrounds a stage's forward, kept so that it can be run again exactly: random state, autocast, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rotor_profiling.isolate import RandomState, Slot, buffer_slots

# Their output in training does not depend on their statistics, which they leave alone when they do not track them.
_PLAIN_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_moving: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
"""Per stage, the positions of the buffers that its forward was seen to change."""


@dataclass(frozen=True, slots=True)
class Autocast:
    """The state of autocast for one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def context(self, cache: bool) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=cache)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What one forward of a stage found around it. `random` is None where the forward drew no random number."""

    autocast: tuple[Autocast, ...]
    random: RandomState | None
    buffers: tuple[tuple[Slot, torch.Tensor], ...]

    @contextmanager
    def restored(self, function: Callable[..., Any], *, graph: bool, alike: bool = False) -> Iterator[None]:
        """Run `function` inside this context as it was run the first time, leaving no trace of the second.

        Without a `graph`, weights that autocast has cast are not cached: a later forward with a graph in the same
        autocast region would find them there without their history, and lose gradients. `alike` makes autograd save as
        many tensors as the first time, where otherwise it may save fewer.
        """
        with ExitStack() as stack:
            for state in self.autocast:
                if state.enabled or torch.is_autocast_enabled(state.device_type):
                    stack.enter_context(state.context(cache=state.cache and graph))
            if self.random is not None:
                stack.callback(RandomState.now(tuple(device for device, _ in self.random.devices)).restore)
                self.random.restore()
            for (table, name, _), before in self.buffers:
                stack.callback(table.__setitem__, name, table[name])
                table[name] = before.clone()
            for module in _tracking_batch_norms(function):
                if alike:
                    _let_copies_track(module, stack)
                else:
                    stack.callback(setattr, module, "track_running_stats", True)
                    module.track_running_stats = False
            yield


@contextmanager
def recorded(
    function: Callable[..., Any], devices: tuple[torch.device, ...], preserve_rng_state: bool, name: str
) -> Iterator[list[Surroundings]]:
    """Record what surrounds the first forward of `function`, which is run inside this context.

    Yields a list that holds the surroundings once the context has been left.
    """
    autocast = tuple(Autocast.now(kind) for kind in sorted({"cpu", *(device.type for device in devices)}))
    before = RandomState.now(devices) if preserve_rng_state else None
    slots = _own_buffers(function)
    copies = _copies(function, slots)
    versions = [tensor._version for _, _, tensor in slots]
    result: list[Surroundings] = []
    with ExitStack() as stack:
        for state in autocast:
            if state.enabled:
                stack.enter_context(state.context(cache=state.cache and torch.is_grad_enabled()))
        yield result
    drew = before is not None and RandomState.now(devices) != before
    changed = [i for i, (slot, version) in enumerate(zip(slots, versions, strict=True)) if _moved(slot, version)]
    if slots:
        assert isinstance(function, nn.Module)
        if function not in _moving:
            # Some kernels write without raising the version; once, and only once, the values are compared.
            changed = [i for i in copies if i in changed or not _equal(copies[i], slots[i])]
        else:
            changed = sorted({*changed, *copies})
        _moving[function] = _moving.get(function, frozenset()) | frozenset(changed)
        if surprise := [slots[i][1] for i in changed if i not in copies]:
            raise RuntimeError(
                f"buffer {surprise[0]!r} of stage {name!r} was changed by a forward pass for the first time, so the "
                "stage cannot be run again exactly in this step; run the step once more, it is now known to change"
            )
    result.append(
        Surroundings(autocast, before if drew else None, tuple((slots[i], copies[i]) for i in sorted(changed)))
    )


def _let_copies_track(module: nn.Module, stack: ExitStack) -> None:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            stack.callback(module._buffers.__setitem__, name, buffer)
            module._buffers[name] = buffer.clone()


def present(function: Callable[..., Any], devices: tuple[torch.device, ...]) -> Surroundings:
    """What surrounds `function` now: a run inside `restored` will be as one that begins at this moment."""
    slots = _own_buffers(function)
    copies = _copies(function, slots)
    return Surroundings(
        tuple(Autocast.now(kind) for kind in sorted({"cpu", *(device.type for device in devices)})),
        RandomState.now(devices),
        tuple((slots[i], copy) for i, copy in copies.items()),
    )


def _tracking_batch_norms(function: Callable[..., Any]) -> list[Any]:
    if not isinstance(function, nn.Module):
        return []
    return [
        module
        for module in function.modules()
        if type(module) in _PLAIN_BATCH_NORM and module.training and module.track_running_stats
    ]


def _own_buffers(function: Callable[..., Any]) -> list[Slot]:
    """The buffers of `function` that a forward in training may change, other than statistics that do not matter."""
    statistics = {id(module._buffers) for module in _tracking_batch_norms(function)}
    return [slot for slot in buffer_slots(function) if id(slot[0]) not in statistics]


def _copies(function: Callable[..., Any], slots: list[Slot]) -> dict[int, torch.Tensor]:
    known = _moving.get(function) if isinstance(function, nn.Module) else None
    return {i: slot[2].clone() for i, slot in enumerate(slots) if known is None or i in known}


def _moved(slot: Slot, version: int) -> bool:
    table, name, tensor = slot
    return table[name] is not tensor or tensor._version != version


def _equal(copy: torch.Tensor, slot: Slot) -> bool:
    table, name, _ = slot
    return torch.equal(copy, table[name])


def moving_buffers(function: Callable[..., Any]) -> list[torch.Tensor]:
    """The buffers of which a copy is kept while `function` may be run again, as far as its runs so far have shown."""
    known = _moving.get(function, frozenset()) if isinstance(function, nn.Module) else frozenset()
    return [slot[2] for i, slot in enumerate(_own_buffers(function)) if i in known]
