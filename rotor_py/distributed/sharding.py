"""Read the parameter groups of FSDP2 (`fully_shard`) and gather them.

Only this file reads FSDP's private attributes. It knows their names in all supported versions of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rotor_profiling.isolate import parameter_slots, substituted, undoing
from rotor_profiling.storage import local
from rotor_profiling.torch_compat import has_fsdp_module, is_dtensor, is_fsdp_module
from rotor_profiling.value_tree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Tensors = tuple[torch.Tensor, ...]
HookPlace = tuple[dict[int, Any], int]  # a module's dict of hooks, and the key of one hook


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParameter:
    sharded: nn.Parameter  # a DTensor with this process's shard and the shape of the whole parameter
    places: tuple[tuple[nn.Module, str], ...]  # each module that has the parameter, and its name in this module
    dtype: torch.dtype  # dtype of the gathered parameter
    device: torch.device  # device of the gathered parameter
    size: torch.Size  # shape after gathering: with tensor parallelism, the shape of this process's part
    layout: Any  # with tensor parallelism, the `DTensorSpec` of the gathered parameter; otherwise None
    mesh: DeviceMesh  # processes with a shard of the parameter; along any dimension but the last, the shard is the same
    dim: int  # tensor dimension along which the parameter is sharded

    def gather(self) -> torch.Tensor:
        """Return the gathered parameter; with tensor parallelism, this process's part as a DTensor. Collective."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        sharded = self.sharded.detach()
        assert is_dtensor(sharded)
        if self.layout is None:
            return sharded.full_tensor().to(self.dtype)
        stride = torch.empty(self.size, device="meta").stride()
        # Do not use the placements of `sharded`, which include those of tensor parallelism.
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(self.dim)]
        spread = DTensor.from_local(
            local(sharded), self.mesh, placements, run_check=False, shape=self.size, stride=stride
        )
        return self.laid_out(spread.full_tensor().to(self.dtype))

    def laid_out(self, memory: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return memory
        from torch.distributed.tensor import DTensor

        mesh, placements, meta = self.layout.mesh, self.layout.placements, self.layout.tensor_meta
        return DTensor.from_local(memory, mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride)


class ShardGroup:
    """Parameters of one `fully_shard` call, which FSDP gathers before its modules run and frees afterwards."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.modules: tuple[nn.Module, ...] = tuple(state._modules)
        policy = state._mp_policy
        self.input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype: torch.dtype | None = policy.output_dtype
        self.reduce_dtype: torch.dtype | None = policy.reduce_dtype  # dtype of sent gradients; None: the parameter's
        self._gathered_here = False
        self._before = _ids(state._pre_forward_hook_handle)
        self._after = _ids(state._post_forward_hook_handle)

    @property
    def parameters(self) -> list[ShardedParameter]:
        return [self._described(each) for part in self._parts for each in part.fsdp_params]

    @property
    def reshards(self) -> bool:
        """Whether a forward frees the gathered parameters, and the backward gathers them again."""
        return any(part._reshard_after_forward for part in self._parts)

    @property
    def is_whole(self) -> bool:
        return all(part.is_unsharded for part in self._parts)

    @property
    def spread_after_forward(self) -> int:
        """Smallest number of processes over which a forward leaves a parameter sharded; 0: as many as between steps."""
        fewer = [part.post_forward_mesh_info.shard_mesh_size for part in self._parts if part._use_post_forward_mesh]
        return int(min(fewer, default=0))

    def contains(self, other: ShardGroup) -> bool:
        return other is not self and any(module in other.modules for own in self.modules for module in own.modules())

    @property
    def keeps_gradients(self) -> bool:
        return any(not part.reduce_grads for part in self._parts)

    @property
    def unsupported(self) -> str | None:
        """Why `ShardedParameter` cannot describe a parameter, to end a sentence "a parameter …"; None if it can."""
        for part in self._parts:
            for each in part.fsdp_params:
                if hasattr(each.sharded_param._local_tensor, "fsdp_pre_all_gather"):
                    return f"has its own code for gathering ({type(each.sharded_param._local_tensor).__name__})"
        return None

    def enter(self, module: int, tensors: Tensors) -> Tensors:
        """Gather parameters by FSDP's pre-forward hook; return inputs whose backward makes FSDP send the gradients."""
        (hooks, key), _ = self.hook_places(module)
        # The hook copies the arguments to FSDP's device, which fails if there are none: then pass a keyword.
        entered: Any = hooks[key](self.modules[module], tensors, {} if tensors else {"nothing": None})
        # The hook returns None if another module of the group has gathered the parameters before.
        return tensors if entered is None else tuple(entered[0])

    def leave(self, module: int, tensors: Tensors) -> Tensors:
        """Run FSDP's post-forward hook. Return outputs whose gradients make FSDP gather parameters for the backward."""
        _, (hooks, key) = self.hook_places(module)
        left: Any = hooks[key](self.modules[module], (), tensors)
        return tensors if left is None else tuple(left)

    def gather(self) -> None:
        if not self.is_whole:
            # Parameters that FSDP has prefetched are for the backward that comes next: FSDP frees them after it.
            coming = any(part._all_gather_result is not None for part in self._parts)
            self._gathered_here = self.reshards and not coming
            # `unshard` and `reshard` of any one module apply to the whole group.
            self.modules[0].unshard()  # type: ignore[operator] # an FSDPModule

    def let_go(self) -> None:
        # Once the group's own backward has begun, FSDP reads the parameters, and frees them afterwards.
        if self._gathered_here and not any(part._training_state.name == "PRE_BACKWARD" for part in self._parts):
            self.modules[0].reshard()  # type: ignore[operator] # an FSDPModule
        self._gathered_here = False

    def hook_places(self, module: int) -> tuple[HookPlace, HookPlace]:
        found = self.modules[module]
        return (
            (found._forward_pre_hooks, _key(found._forward_pre_hooks, self._before)),
            (found._forward_hooks, _key(found._forward_hooks, self._after)),
        )

    @property
    def _parts(self) -> list[Any]:
        # Newer versions of torch split the parameters of one call by device mesh; older ones have a single group.
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
            parameter._orig_size,
            # Before torch 2.13, the attribute was named `_tp_spec`.
            getattr(parameter, "_unsharded_dtensor_spec", None) or getattr(parameter, "_tp_spec", None),
            parameter.mesh_info.mesh,
            getattr(getattr(parameter, "fsdp_placement", None), "dim", 0),
        )


def groups_of(model: nn.Module) -> list[ShardGroup]:
    if not dist.is_initialized():  # `fully_shard` needs initialized processes
        return []
    modules: list[Any] = [module for module in model.modules() if is_fsdp_module(module)]
    return [ShardGroup(state) for state in dict.fromkeys(module._get_fsdp_state() for module in modules)]


Sharding = Mapping[int, ShardedParameter]  # sharded parameters of a model, by the `id` of their `sharded`


def sharding_of(model: nn.Module, *, mixed_precision: bool) -> Sharding:
    """Return the parameters sharded by `fully_shard`. Unless `mixed_precision`, ignore the dtypes of its policies."""
    found = [each for group in groups_of(model) for each in group.parameters]
    if not mixed_precision:
        found = [replace(each, dtype=each.sharded.dtype) for each in found]
    return {id(each.sharded): each for each in found}


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in `value` to `dtype`, as FSDP's mixed precision does; None changes nothing."""
    if dtype is None:
        return value
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor,
        value,
    )


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Inside the context, the model's parameters are the shards, as between steps, even if FSDP has gathered some."""
    with undoing() as undo:
        for group in groups_of(model):
            for each in group.parameters:
                for module, name in each.places:
                    undo.append(partial(module._parameters.__setitem__, name, module._parameters[name]))
                    module._parameters[name] = each.sharded
        yield


def _ids(handle: Any) -> frozenset[int]:
    return frozenset(each.id for each in getattr(handle, "handles", (handle,)))


def _key(table: dict[int, Any], keys: frozenset[int]) -> int:
    (found,) = keys & table.keys()
    return found


_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_sharded(model: nn.Module) -> bool:
    return dist.is_initialized() and has_fsdp_module(model)  # FSDP needs initialized processes


def keeps_gradients(model: nn.Module) -> bool:
    return any(group.keeps_gradients for group in groups_of(model))


def gathers_in_another_dtype(model: nn.Module) -> bool:
    """Whether any parameter is gathered in another dtype, as by `MixedPrecisionPolicy(param_dtype=…)`."""
    return any(each.dtype != each.sharded.dtype for group in groups_of(model) for each in group.parameters)


def as_entered(model: nn.Module, arguments: Any) -> Any:
    """Cast the arguments of a call of `model` as FSDP's pre-forward hook does."""
    return cast(arguments, next((each.input_dtype for each in groups_of(model) if model in each.modules), None))


def as_left(model: nn.Module, output: Any) -> Any:
    """Cast the output of a call of `model` as FSDP's post-forward hook does."""
    return cast(output, next((each.output_dtype for each in groups_of(model) if model in each.modules), None))


@contextmanager
def gathered(function: Any, sharding: Sharding) -> Iterator[None]:
    """Give a stage's modules gathered parameters inside the context, and remove its FSDP modules' hooks. Collective."""
    if not sharding or not isinstance(function, nn.Module):
        yield
        return
    tables = [getattr(module, name) for module in function.modules() for name in _TABLES if is_fsdp_module(module)]
    slots = parameter_slots(function, sharding)
    trained = {id(sharded): sharded.requires_grad for _, _, sharded in slots}  # a tied parameter is gathered once
    whole: dict[int, torch.Tensor] = {key: nn.Parameter(sharding[key].gather(), each) for key, each in trained.items()}
    with undoing() as undo, substituted(slots, whole):
        for table in tables:
            undo.append(partial(table.update, dict(table)))
            table.clear()
        yield


@contextmanager
def gathered_to_read() -> Iterator[Callable[[Collection[ShardGroup]], None]]:
    """Gather sharded parameters that a recomputation in a backward reads, since FSDP may have gathered another group.

    Yields a function that gathers groups and frees others that it gathered. All processes must make the same calls.
    """
    here: list[ShardGroup] = []

    def need(groups: Collection[ShardGroup]) -> None:
        for group in here:
            if group not in groups:
                group.let_go()
        here[:] = [group for group in here if group in groups]
        for group in groups:
            if not group.is_whole:
                group.gather()
                here.append(group)

    try:
        yield need
    finally:
        need(())
