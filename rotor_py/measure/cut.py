"""Cutting a model into the stages of a chain."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rotor_profiling import isolated, memory_meter, storage_bytes, storages, tensors_in
from rotor_profiling.backends import stopwatch
from rotor_profiling.storage import wait_for
from rotor_profiling.timing import seconds_of
from rotor_profiling.torch_compat import tree_map_only
from rotor_py.distributed.sharding import Sharding, gathered, sharding_of
from rotor_py.errors import UnsupportedModelError
from rotor_py.measure.measurement import PrefixCost
from rotor_py.stage.error_context import During
from rotor_py.stage.protocol import offers_of

Layer = tuple[str, nn.Module]
"""A module, and its dotted path in the model."""
_NOTHING: Sharding = MappingProxyType({})
JOINT = "+"
"""Between the names of layers that are one stage."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A model as a chain: `prefix` runs first and never has a gradient; `stages` are what a sequence is about.

    `input_owned` says that the caller holds the chain's input throughout, so that dropping it would free nothing.
    `sharding` has the parameters that have to be gathered to measure a stage by itself. `members` are the layers of
    every stage, where its name does not say them.
    """

    prefix: tuple[Layer, ...]
    stages: tuple[Layer, ...]
    input_owned: bool = False
    sharding: Sharding = field(default_factory=dict)
    members: tuple[tuple[str, ...], ...] | None = None

    def groups(self) -> list[list[str]]:
        """The names of the layers of every stage."""
        if self.members is not None:
            return [list(names) for names in self.members]
        return [name.split(JOINT) for name, _ in self.stages]


def is_chain(model: nn.Module) -> bool:
    """Whether `model` is a nesting of `nn.Sequential`, so that its layers are its stages."""
    # Not `isinstance`: a subclass may have a forward that does more than to call its layers in order. So may a model of
    # which somebody has replaced the forward: Accelerate puts autocast around it.
    return type(model).forward is nn.Sequential.forward and "forward" not in model.__dict__


def layers(model: nn.Module) -> list[Layer]:
    """The layers of any nesting of `nn.Sequential`, with their dotted paths, in the order in which they run.

    A container with hooks, or with a `forward` of its own, is one layer: whoever hooked it wants it to be called.
    UnsupportedModelError if `model` itself is not such a chain.
    """
    if not is_chain(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not an nn.Sequential, so it cannot be cut into stages; write it as an "
            "nn.Sequential of its layers (rotor_py.models has examples)",
            kind="not_sequential",
            name=type(model).__name__,
        )
    return _children("", model)


def _children(path: str, module: nn.Module) -> list[Layer]:
    named = [(path + key, child) for key, child in module._modules.items() if child is not None]
    return [layer for name, child in named for layer in _layers(name, child)]


def _layers(name: str, module: nn.Module) -> list[Layer]:
    plain = type(module).forward is nn.Sequential.forward and len(module._modules) > 0
    return _children(f"{name}.", module) if plain and not _hooked(module) else [(name, module)]


def _hooked(module: nn.Module) -> bool:
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(tables) or module._compiled_call_impl is not None


def cut(model: nn.Module, value: Any, device: torch.device) -> Cut:
    """Cut `model` into stages by running it once on the input `value`, one layer at a time, without gradients. What
    follows the last layer that has to be run to know what it does (`StageOffers.makes_its_own`) is not run.

    A layer that makes nothing new, because it writes into its input or returns a view of it, is joined to the layer
    before it. From an input that it overwrites, it could not be run again; and freeing an input frees nothing while the
    output is a view of it. If the layers before it only handed on what it overwrites, it is joined to the one that made
    it. Leading layers that have nothing to train and get no gradient are the prefix.

    Raises UnsupportedModelError if `model` is no nesting of `nn.Sequential`, if it has nothing to train, or if a layer
    returns no tensor or cannot be run again with the same numbers. What a layer raises passes through, with a note that
    names the layer.
    """
    # In their own dtype: the hooks that would cast the input to that of a mixed precision policy do not run.
    return cut_layers(layers(model), value, device, sharding_of(model, mixed_precision=False))


def cut_layers(found: list[Layer], value: Any, device: torch.device, sharding: Sharding = _NOTHING) -> Cut:
    """`cut`, for layers that are given in the order in which they run; `sharding` is that of their model.

    UnsupportedModelError as from `cut`.
    """
    # An input that needs a gradient needs the backward of every layer, so there is no prefix.
    needs_gradient = any(tensor.requires_grad for tensor in tensors_in(value))
    leading = 0 if needs_gradient else next((i for i, (_, m) in enumerate(found) if _trains(m)), len(found))
    if leading == len(found):
        raise UnsupportedModelError(
            "no parameter of the model and no input needs a gradient, so there is nothing to train; set "
            "requires_grad on what should be trained",
            kind="no_gradient",
        )
    refuse_random_state_of_its_own(found[leading:], device)
    # A copy, since the first layer may write into it.
    value = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
    groups: list[list[Layer]] = []
    made_by: dict[int, int] = {}
    """for the address of what a group has made and is still handed on, the number of that group"""
    unknown = [at for at, (_, module) in enumerate(found) if not offers_of(module).makes_its_own]
    runs = 1 + max(unknown, default=-1)
    for position, (name, module) in enumerate(found[:runs]):
        given = storages(tensors_in(value))
        value, wrote, made_nothing = _run(name, module, value, device, sharding)
        if position == leading and wrote:
            raise UnsupportedModelError(
                f"layer {name!r} overwrites the input of the chain, and no stage before it could be joined to it; use "
                "the layer without inplace=True",
                kind="in_place_input",
                name=name,
            )
        if position < leading:
            continue
        if position == leading or not (wrote or made_nothing):
            groups.append([(name, module)])
        else:
            last = len(groups) - 1
            first = min((made_by.get(address, last) for address in wrote), default=last)
            groups[first:] = [[*itertools.chain.from_iterable(groups[first:]), (name, module)]]
        own = len(groups) - 1
        known = {address: min(maker, own) for address, maker in made_by.items() if address in given}
        new = dict.fromkeys(storages(tensors_in(value)).keys() - given.keys(), own)
        made_by = {**known, **new}
    groups += [[layer] for layer in found[max(leading, runs) :]]
    return Cut(tuple(found[:leading]), tuple(joined(group) for group in groups), sharding=sharding)


def refuse_random_state_of_its_own(found: list[Layer], device: torch.device) -> None:
    """UnsupportedModelError for recurrent layers on CUDA with dropout between them.

    cuDNN draws their random numbers from a state that nobody can set back. Run again, a layer would drop other values.
    """
    if device.type != "cuda" or not torch.backends.cudnn.enabled:
        return
    for name, module in found:
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase) and layer.num_layers > 1 and layer.dropout and layer.training:
                raise UnsupportedModelError(
                    f"layer {name!r} has dropout between the layers of its {type(layer).__name__}, which cuDNN draws "
                    "from a random state of its own, so that it cannot be run again with the same numbers; use "
                    "single-layer modules with nn.Dropout between them, or torch.backends.cudnn.enabled = False",
                    kind="recurrent_dropout",
                    name=name,
                )


def _run(
    name: str, module: nn.Module, value: Any, device: torch.device, sharding: Sharding
) -> tuple[Any, set[int], bool]:
    """The output of a layer, where it wrote into its input, and whether its output lies in its input's memory."""
    inputs = tensors_in(value)
    before = [tensor._version for tensor in inputs]
    with (
        During("first run, to measure it,", name),
        gathered(module, sharding),
        isolated(module, device),
        torch.no_grad(),
    ):
        output = module(value)
        wait_for(output)
    outputs = tensors_in(output)
    if not outputs:
        raise UnsupportedModelError(
            f"layer {name!r} returned no tensor, so nothing after it can be trained", kind="no_tensor", name=name
        )
    # By version, not by value: a ReLU in place may happen to change nothing on this input.
    written = [tensor for tensor, version in zip(inputs, before, strict=True) if tensor._version != version]
    made_nothing = storages(outputs).keys() <= storages(inputs).keys()
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output), set(storages(written)), made_nothing


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def joined(group: list[Layer]) -> Layer:
    """The layers of `group`, which follow each other, as one stage."""
    if len(group) == 1:
        return group[0]
    return JOINT.join(name for name, _ in group), nn.Sequential(*(module for _, module in group))


def run_prefix(cut: Cut, value: Any, device: torch.device) -> tuple[Any, PrefixCost | None]:
    """The input of the chain, and the cost of the layers before it."""
    if not cut.prefix:
        return value, None
    modules = nn.Sequential(*(module for _, module in cut.prefix))
    # A copy, since a layer may write into it.
    value = tree_map_only(torch.Tensor, torch.clone, value)
    with gathered(modules, cut.sharding), isolated(modules, device), torch.no_grad():
        modules(value)  # libraries allocate at the first call what they keep for good
        with memory_meter(device) as meter:
            output = modules(value)
        with stopwatch(device) as watch:
            seconds = seconds_of(lambda: modules(value), watch)
    (phase,) = meter.phases.values()
    return output, PrefixCost(seconds, max(0, phase.rise - storage_bytes(tensors_in(output))))
