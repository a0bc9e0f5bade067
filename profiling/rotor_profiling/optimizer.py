"""Bytes that an optimizer keeps and needs, found by running its step on tensors without memory."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling.storage import tensors_in


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """`state_bytes` stay from step to step; `step_bytes` more are needed while `step()` runs, once there is a state.

    `present_bytes` of the state are there already.
    """

    state_bytes: int
    step_bytes: int
    present_bytes: int = 0


def optimizer_cost(optimizer: torch.optim.Optimizer) -> OptimizerCost:
    """What `optimizer` will keep and need in training, though it may not have taken a step yet.

    A twin of the optimizer takes two steps on meta tensors; the optimizer and its parameters are not touched.
    ValueError if the twin cannot, as with an optimizer that reads values of gradients.
    """
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    twin = _twin(optimizer, foreach="cuda" in devices)
    live = _LiveBytes()
    try:
        with live:
            twin.step()
            live.reset()
            twin.step()
    except Exception as error:
        raise ValueError(
            f"the memory of {type(optimizer).__name__} could not be found without running it: {error}"
        ) from error
    return OptimizerCost(
        state_bytes=_state_bytes(twin, {"meta", *devices}),
        step_bytes=live.peak,
        present_bytes=_state_bytes(optimizer, devices),
    )


def _state_bytes(optimizer: torch.optim.Optimizer, devices: set[str]) -> int:
    kept = [tensor for state in optimizer.state.values() for tensor in tensors_in(list(state.values()))]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor.device.type in devices)


def _twin(optimizer: torch.optim.Optimizer, foreach: bool) -> torch.optim.Optimizer:
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    groups = []
    for group in optimizer.param_groups:
        group = dict(group, params=[_stand_in(parameter) for parameter in group["params"] if parameter.requires_grad])
        if foreach and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
        if group.get("fused"):
            group["fused"] = False
        groups.append(group)
    twin.param_groups = groups
    return twin


def _stand_in(parameter: torch.Tensor) -> torch.nn.Parameter:
    twin = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    twin.grad = torch.empty_like(twin)
    return twin


@dataclass(slots=True)
class _Held:
    now: int = 0
    peak: int = 0
    known: set[int] = field(default_factory=set)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of meta storages that are created while the mode is active and have not been freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._held = _Held()

    @property
    def peak(self) -> int:
        return self._held.peak

    def reset(self) -> None:
        """Count from here on only what is created from here on."""
        self._held = _Held()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        held = self._held
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.device.type != "meta" or key in given or key in held.known:
                continue
            size = storage.nbytes()
            held.known.add(key)
            held.now += size
            held.peak = max(held.peak, held.now)
            weakref.finalize(storage, _freed, held, key, size)
        return result


def _freed(held: _Held, key: int, size: int) -> None:
    held.known.discard(key)
    held.now -= size
