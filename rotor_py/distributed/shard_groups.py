"""What `fully_shard` (FSDP2) knows of a model: groups of parameters that are gathered together.

PyTorch has no public way to ask, so this is the one file that reads its private attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined] # not in newer ones

__all__ = ["FSDPModule", "ShardGroup", "ShardedParameter", "at_rest", "cast", "groups_of"]

Tensors = tuple[torch.Tensor, ...]
HookPlace = tuple[dict[int, Any], int]
"""A table of hooks, and the key of one of them."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParameter:
    """A parameter that processes share: its part here, where modules keep it, and as what and where it is gathered."""

    sharded: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]
    dtype: torch.dtype
    device: torch.device


class ShardGroup:
    """The parameters of one call of `fully_shard`, which are gathered before its modules run, and after it let go."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.modules: tuple[nn.Module, ...] = tuple(state._modules)
        policy = state._mp_policy
        self.input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype: torch.dtype | None = policy.output_dtype
        self._reduce_dtype: torch.dtype | None = policy.reduce_dtype
        self._passing = False
        self._before = _ids(state._pre_forward_hook_handle)
        self._after = _ids(state._post_forward_hook_handle)

    @property
    def parameters(self) -> list[ShardedParameter]:
        """All that are gathered together."""
        return [self._described(each) for part in self._parts for each in part.fsdp_params]

    @property
    def reshards(self) -> bool:
        """Whether the parameters are let go after a forward."""
        return any(part._reshard_after_forward for part in self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered now."""
        return all(part.is_unsharded for part in self._parts)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole parameters, as they are gathered."""
        return sum(each.sharded.numel() * each.dtype.itemsize for each in self.parameters)

    @property
    def kept_bytes(self) -> int:
        """Bytes that a forward leaves here, where the parameters are then spread over fewer processes."""
        fewer = [part.post_forward_mesh_info.shard_mesh_size for part in self._parts if part._use_post_forward_mesh]
        return self.whole_bytes // min(fewer) if fewer else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of their gradients, as they are made."""
        return sum(each.sharded.numel() * each.dtype.itemsize for each in self.parameters if each.sharded.requires_grad)

    @property
    def sent_bytes(self) -> int:
        """Bytes of their gradients, as they are sent and kept."""
        sizes = [(each.sharded.numel(), each.dtype) for each in self.parameters if each.sharded.requires_grad]
        return sum(size * (self._reduce_dtype or dtype).itemsize for size, dtype in sizes)

    def contains(self, other: ShardGroup) -> bool:
        """Whether the modules of another group are inside of those of this one."""
        return other is not self and any(module in other.modules for own in self.modules for module in own.modules())

    @property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients are kept to be added to, and not sent: `set_requires_gradient_sync(False)`."""
        return any(not part.reduce_grads for part in self._parts)

    @property
    def unsupported(self) -> str | None:
        """What it is about the parameters that stands in the way of whole ones that look like any; None if nothing."""
        for part in self._parts:
            for each in part.fsdp_params:
                if getattr(each, "is_dtensor", False):
                    return "is split by tensor parallelism, too"
                if hasattr(each.sharded_param._local_tensor, "fsdp_pre_all_gather"):
                    return f"is gathered in a way of its own ({type(each.sharded_param._local_tensor).__name__})"
        return None

    def enter(self, module: int, tensors: Tensors) -> Tensors:
        """Gather, as before the forward of a module; `tensors` are those of its input that need a gradient.

        They are returned so that gradients are sent when the backward has come through them.
        """
        found = self.modules[module]
        entered = _hook(found._forward_pre_hooks, self._before)(found, tensors, {})
        return tensors if entered is None else tuple(entered[0])  # None: gathered for another module of the group

    def leave(self, module: int, tensors: Tensors) -> Tensors:
        """Let go, as after the forward of a module; `tensors` are those of its output that need a gradient.

        Their gradients gather the parameters again.
        """
        found = self.modules[module]
        left = _hook(found._forward_hooks, self._after)(found, (), tensors)
        return tensors if left is None else tuple(left)

    def gather(self) -> None:
        """Gather the parameters to run something again in the backward, if they are not there."""
        if not self.is_whole:
            coming = any(part._all_gather_result is not None for part in self._parts)  # for the backward that is next
            self._passing = self.reshards and not coming
            self.modules[0].unshard()  # type: ignore[operator] # an FSDPModule

    def let_go(self) -> None:
        """Undo `gather`, if it did anything."""
        backward = any(part._training_state.name == "PRE_BACKWARD" for part in self._parts)
        if self._passing and not backward:
            self.modules[0].reshard()  # type: ignore[operator] # an FSDPModule
        self._passing = False

    def hook_places(self, module: int) -> tuple[HookPlace, HookPlace]:
        """Where a module keeps the hooks that gather and let go."""
        found = self.modules[module]
        return (
            (found._forward_pre_hooks, _key(found._forward_pre_hooks, self._before)),
            (found._forward_hooks, _key(found._forward_hooks, self._after)),
        )

    @property
    def _parts(self) -> list[Any]:
        several = getattr(self._state, "_fsdp_param_groups", None)
        found = [self._state._fsdp_param_group] if several is None else several
        return [each for each in found if each is not None]

    def _described(self, parameter: Any) -> ShardedParameter:
        at, sharded = parameter._module_info, parameter.sharded_param
        dtype = self._state._mp_policy.param_dtype
        return ShardedParameter(
            sharded,
            ((at.module, at.param_name), *zip(at.shared_modules, at.shared_param_names, strict=True)),
            dtype if dtype is not None and sharded.dtype.is_floating_point else sharded.dtype,
            parameter.device,
        )


def groups_of(model: nn.Module) -> list[ShardGroup]:
    """The groups of a model, in the order in which `model.modules()` comes to them."""
    if not dist.is_initialized():
        return []
    states = {id(state): state for state in (_state(m) for m in model.modules() if isinstance(m, FSDPModule))}
    return [ShardGroup(state) for state in states.values()]


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with its floating-point tensors in `dtype`, if there is one: what mixed precision makes of it."""
    if dtype is None:
        return value
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor,
        value,
    )


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Show the parameters as they are between steps, each process with its part, whichever are gathered now."""
    slots = [
        (module._parameters, name, module._parameters[name], each.sharded)
        for group in groups_of(model)
        for each in group.parameters
        for module, name in each.places
    ]
    try:
        for table, name, _, sharded in slots:
            table[name] = sharded
        yield
    finally:
        for table, name, present, _ in slots:
            table[name] = present


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _ids(handle: Any) -> frozenset[int]:
    """The keys of a hook, or of the hooks that several modules have in common."""
    return frozenset(each.id for each in getattr(handle, "handles", (handle,)))


def _key(table: dict[int, Any], keys: frozenset[int]) -> int:
    (found,) = keys & table.keys()
    return found


def _hook(table: dict[int, Any], keys: frozenset[int]) -> Callable[..., Any]:
    found: Callable[..., Any] = table[_key(table, keys)]
    return found
