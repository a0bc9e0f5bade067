"""Read the groups of parameters that FSDP has sharded, and gather them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rotor_profiling.storage import local
from rotor_profiling.torch_classes import has_fsdp_module, is_dtensor, is_fsdp_module
from rotor_profiling.torch_compat import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# The groups of parameters that `fully_shard` (FSDP2) gathers together, one for every call of it.
#
# PyTorch has no public way to ask for them, so this file reads FSDP's private attributes, and is the only one that
# does.
# Where they differ between versions of torch, both names are here.


Tensors = tuple[torch.Tensor, ...]
HookPlace = tuple[dict[int, Any], int]
"""A table of hooks, and the key of one of them."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParameter:
    """A parameter of which every process has a part."""

    sharded: nn.Parameter
    """This process's part, as a DTensor; its shape is that of the whole parameter."""
    places: tuple[tuple[nn.Module, str], ...]
    """The modules that use the parameter, and its name in each."""
    dtype: torch.dtype
    """The dtype in which it is gathered."""
    device: torch.device
    """The device on which it is gathered."""
    size: torch.Size
    """Its shape when it is gathered, in this process: with tensor parallelism, a part of the whole parameter's."""
    layout: Any
    """What makes a DTensor of it when it is gathered (`DTensorSpec`), with tensor parallelism; None without."""
    mesh: DeviceMesh
    """The processes that it is gathered from, and those that have the same part."""
    dim: int
    """The dimension in which it is divided among them."""

    def gather(self) -> torch.Tensor:
        """What FSDP has modules use: the whole parameter or, with tensor parallelism, this process's part as a DTensor.

        All processes have to call this together.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        sharded = self.sharded.detach()
        assert is_dtensor(sharded)
        if self.layout is None:
            return sharded.full_tensor().to(self.dtype)
        stride = torch.empty(self.size, device="meta").stride()
        # Not by the placements of `sharded`: those are about both kinds of parallelism at once.
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(self.dim)]
        spread = DTensor.from_local(
            local(sharded), self.mesh, placements, run_check=False, shape=self.size, stride=stride
        )
        return self.laid_out(spread.full_tensor().to(self.dtype))

    def laid_out(self, memory: torch.Tensor) -> torch.Tensor:
        """The gathered parameter, in this memory."""
        if self.layout is None:
            return memory
        from torch.distributed.tensor import DTensor

        meta, layout = self.layout.tensor_meta, self.layout
        return DTensor.from_local(
            memory, layout.mesh, layout.placements, run_check=False, shape=meta.shape, stride=meta.stride
        )


class ShardGroup:
    """The parameters of one call of `fully_shard`, gathered before its modules run and let go of after that."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.modules: tuple[nn.Module, ...] = tuple(state._modules)
        policy = state._mp_policy
        self.input_dtype: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype: torch.dtype | None = policy.output_dtype
        self.reduce_dtype: torch.dtype | None = policy.reduce_dtype
        """The dtype in which gradients are sent; None for that of the parameter."""
        self._gathered_here = False
        self._before = _ids(state._pre_forward_hook_handle)
        self._after = _ids(state._post_forward_hook_handle)

    @property
    def parameters(self) -> list[ShardedParameter]:
        """The parameters of the group."""
        return [self._described(each) for part in self._parts for each in part.fsdp_params]

    @property
    def reshards(self) -> bool:
        """Whether the parameters are let go of after a forward, to be gathered again for the backward."""
        return any(part._reshard_after_forward for part in self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered now."""
        return all(part.is_unsharded for part in self._parts)

    @property
    def spread_after_forward(self) -> int:
        """The least number of processes that share a parameter after a forward; 0 if as many as between steps do."""
        fewer = [part.post_forward_mesh_info.shard_mesh_size for part in self._parts if part._use_post_forward_mesh]
        return int(min(fewer, default=0))

    def contains(self, other: ShardGroup) -> bool:
        """Whether a module of another group is inside a module of this one."""
        return other is not self and any(module in other.modules for own in self.modules for module in own.modules())

    @property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients are added up here instead of sent: `set_requires_gradient_sync(False)`."""
        return any(not part.reduce_grads for part in self._parts)

    @property
    def unsupported(self) -> str | None:
        """Why gathered parameters are not what `ShardedParameter` says, as the end of a sentence; None if they are."""
        for part in self._parts:
            for each in part.fsdp_params:
                if hasattr(each.sharded_param._local_tensor, "fsdp_pre_all_gather"):
                    return f"is gathered in a way of its own ({type(each.sharded_param._local_tensor).__name__})"
        return None

    def enter(self, module: int, tensors: Tensors) -> Tensors:
        """Do what FSDP does before the forward of a module; `tensors` are those of its input that need a gradient.

        Returns them with a node of FSDP's in their history, which sends gradients when the backward comes through it.
        """
        found = self.modules[module]
        # On a device, FSDP takes the first of what it has moved there, and of nothing there is no first.
        keywords = {} if tensors else {"nothing": None}
        entered = _hook(found._forward_pre_hooks, self._before)(found, tensors, keywords)
        # FSDP's hook returns None if another module of the group has had it gathered already.
        return tensors if entered is None else tuple(entered[0])

    def leave(self, module: int, tensors: Tensors) -> Tensors:
        """Do what FSDP does after the forward of a module; `tensors` are those of its output that need a gradient.

        Returns them with hooks of FSDP's, which gather the parameters again when their gradients arrive.
        """
        found = self.modules[module]
        left = _hook(found._forward_hooks, self._after)(found, (), tensors)
        return tensors if left is None else tuple(left)

    def gather(self) -> None:
        """Gather the parameters for running a stage again in the backward, if they are not there."""
        if not self.is_whole:
            # Parameters that are on their way were asked for by FSDP, for a backward that comes next and frees them.
            coming = any(part._all_gather_result is not None for part in self._parts)
            self._gathered_here = self.reshards and not coming
            # Of any module: `unshard` and `reshard` are about the whole group.
            self.modules[0].unshard()  # type: ignore[operator] # an FSDPModule

    def let_go(self) -> None:
        """Undo `gather`, if it did anything."""
        # Once the group's own backward has begun, FSDP needs the parameters, and frees them by itself.
        backward = any(part._training_state.name == "PRE_BACKWARD" for part in self._parts)
        if self._gathered_here and not backward:
            self.modules[0].reshard()  # type: ignore[operator] # an FSDPModule
        self._gathered_here = False

    def hook_places(self, module: int) -> tuple[HookPlace, HookPlace]:
        """Where a module keeps the hooks that gather and let go."""
        found = self.modules[module]
        return (
            (found._forward_pre_hooks, _key(found._forward_pre_hooks, self._before)),
            (found._forward_hooks, _key(found._forward_hooks, self._after)),
        )

    @property
    def _parts(self) -> list[Any]:
        # Newer versions of torch divide the parameters of one call by device mesh; older ones have one group.
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
            # Called `_tp_spec` before torch 2.13.
            getattr(parameter, "_unsharded_dtensor_spec", None) or getattr(parameter, "_tp_spec", None),
            parameter.mesh_info.mesh,
            getattr(getattr(parameter, "fsdp_placement", None), "dim", 0),
        )


def groups_of(model: nn.Module) -> list[ShardGroup]:
    """The groups of a model, in the order in which `model.modules()` comes to them."""
    # `fully_shard` needs processes, so without them there is nothing to look for.
    if not dist.is_initialized():
        return []
    states = {id(state): state for state in (_state(m) for m in model.modules() if is_fsdp_module(m))}
    return [ShardGroup(state) for state in states.values()]


Sharding = Mapping[int, ShardedParameter]
"""The sharded parameters of a model, each by the `id` of what a process has of it between steps."""


def sharding_of(model: nn.Module, *, mixed_precision: bool) -> Sharding:
    """The parameters that `fully_shard` has divided among processes, to be gathered in the dtype of its mixed
    precision policy, or else in their own.
    """
    found = [each for group in groups_of(model) for each in group.parameters]
    if not mixed_precision:
        found = [replace(each, dtype=each.sharded.dtype) for each in found]
    return {id(each.sharded): each for each in found}


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with its floating-point tensors in `dtype`, as mixed precision has it; None leaves it as it is."""
    if dtype is None:
        return value
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor,
        value,
    )


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Have the parameters on the modules as they are between steps, each process with its part.

    While parameters are gathered, FSDP puts the whole ones on the modules. A fingerprint has to be the same then.
    """
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
    """The keys of a hook in the modules' tables: one for each module, if several share the group."""
    return frozenset(each.id for each in getattr(handle, "handles", (handle,)))


def _key(table: dict[int, Any], keys: frozenset[int]) -> int:
    (found,) = keys & table.keys()
    return found


def _hook(table: dict[int, Any], keys: frozenset[int]) -> Callable[..., Any]:
    found: Callable[..., Any] = table[_key(table, keys)]
    return found


_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to any module of the model."""
    return dist.is_initialized() and has_fsdp_module(model)  # it needs processes


def keeps_gradients(model: nn.Module) -> bool:
    """Whether whole gradients are added up here instead of sent, in any group."""
    return is_sharded(model) and any(group.keeps_gradients for group in groups_of(model))


def gathers_in_another_dtype(model: nn.Module) -> bool:
    """Whether parameters are gathered in another dtype than their own: `MixedPrecisionPolicy(param_dtype=…)`."""
    groups = groups_of(model) if is_sharded(model) else []
    return any(each.dtype != each.sharded.dtype for group in groups for each in group.parameters)


def as_entered(model: nn.Module, arguments: Any) -> Any:
    """The arguments of a call of `model`, cast as the hook of `fully_shard` before its forward casts them."""
    own = _own_group(model) if dist.is_initialized() else None
    return arguments if own is None else cast(arguments, own.input_dtype)


def as_left(model: nn.Module, output: Any) -> Any:
    """The output of a call of `model`, cast as the hook of `fully_shard` after its forward casts it."""
    own = _own_group(model)
    return output if own is None else cast(output, own.output_dtype)


@contextmanager
def gathered(function: Any, sharding: Sharding) -> Iterator[None]:
    """Run a stage as one that is not sharded: with whole parameters, and without the hooks that would gather them.

    All processes have to enter this context together.
    """
    if not sharding or not isinstance(function, nn.Module):
        yield
        return
    modules = list(function.modules())
    hooks = [
        (getattr(module, name), dict(getattr(module, name)))
        for module in modules
        for name in _TABLES
        if is_fsdp_module(module)
    ]
    whole: dict[int, nn.Parameter] = {}  # by id of the sharded one, so that a shared parameter is gathered once
    slots = [(module._parameters, name, p) for module in modules for name, p in module._parameters.items()]
    for _, _, parameter in slots:
        if id(parameter) in sharding and id(parameter) not in whole:
            assert parameter is not None
            whole[id(parameter)] = nn.Parameter(sharding[id(parameter)].gather(), parameter.requires_grad)
    try:
        for table, _ in hooks:
            table.clear()
        for table, name, parameter in slots:
            table[name] = whole.get(id(parameter), parameter)
        yield
    finally:
        for table, name, parameter in slots:
            table[name] = parameter
        for table, kept in hooks:
            table.update(kept)


def _own_group(model: nn.Module) -> ShardGroup | None:
    return next((group for group in groups_of(model) if model in group.modules), None)


@contextmanager
def gathered_again(function: Any) -> Iterator[None]:
    """Have the whole parameters of a stage while it is run again in the backward, and let go of them after that.

    PyTorch frees what a forward has gathered, but not what a forward gathers while a backward runs. Without this, the
    parameters of all stages that are run again one after the other would be there at once.
    """
    if not isinstance(function, nn.Module):
        yield
        return
    hooked = groups_of(function)
    for group in hooked:
        group.gather()
    try:
        yield
    finally:
        for group in hooked:
            group.let_go()


class GatheredToRead:
    """Sharded parameters that a backward makes values from: whole while they are needed, inside of this as a context.

    The operator that asks for a value may belong to another group than those that make it. All processes come here in
    the same order.
    """

    def __init__(self) -> None:
        self._here: list[ShardGroup] = []

    def __enter__(self) -> GatheredToRead:
        return self

    def __exit__(self, *error: object) -> None:
        self._let_go_of_all_but(())

    def need(self, groups: Collection[ShardGroup]) -> None:
        """Gather the parameters of these groups. Those of others are let go of: there may be no room for both."""
        self._let_go_of_all_but(groups)
        for group in groups:
            if not group.is_whole:
                group.gather()
                self._here.append(group)

    def _let_go_of_all_but(self, groups: Collection[ShardGroup]) -> None:
        for group in self._here:
            if group not in groups:
                group.let_go()
        self._here = [group for group in self._here if group in groups]
