"""Cut a model into the stages of a chain."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from rotor_profiling import isolated, memory_meter, storage_bytes, storages, tensors_in
from rotor_profiling.attributes import made_by, making
from rotor_profiling.backends import stopwatch
from rotor_profiling.contents import contents_of, unchanged, with_own_containers
from rotor_profiling.isolate import RandomState, trained_parameters
from rotor_profiling.stage.gradients import enter_graph
from rotor_profiling.storage import wait_for
from rotor_profiling.timing import seconds_of
from rotor_profiling.value_tree import tree_flatten, tree_map_only
from rotor_py.distributed.sharding import Sharding, gathered, sharding_of
from rotor_py.errors import UnsupportedModelError, record_fields
from rotor_py.measure.measurement import PrefixCost
from rotor_py.stage.error_context import During
from rotor_py.stage.first_run import hooks_on_all_modules
from rotor_py.stage.protocol import JOINT, is_called_plainly
from rotor_py.stage.replayed_routing import streams_kept, streams_of

_log = logging.getLogger("rotor_py")
Layer = tuple[str, nn.Module]
"""A layer's dotted path in the model, and its module."""
_NOTHING: Sharding = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Cut:
    """A model as a chain: the layers of `prefix` run first, without gradients; a plan stores or recomputes `stages`.

    `input_owned`: whether the caller keeps the chain's input during the whole step, so that no plan frees it.
    `sharding`: parameters to gather when a stage is measured. `members`: names of each stage's layers; None if in its.
    """

    prefix: tuple[Layer, ...]
    stages: tuple[Layer, ...]
    input_owned: bool = False
    sharding: Sharding = field(default_factory=dict)
    members: tuple[tuple[str, ...], ...] | None = None

    def groups(self) -> list[list[str]]:
        if self.members is not None:
            return [list(names) for names in self.members]
        return [name.split(JOINT) for name, _ in self.stages]


def is_chain(model: nn.Module) -> bool:
    """Whether `model` is an `nn.Sequential` whose forward only calls its layers in order."""
    # `isinstance` does not suffice: the forward of a subclass may do more, and so may one set on the instance, such as
    # Accelerate's, which adds autocast.
    return type(model).forward is nn.Sequential.forward and "forward" not in model.__dict__


def layers(model: nn.Module) -> list[Layer]:
    """Return the layers of nested `nn.Sequential`s, with their dotted paths, in execution order.

    A container with hooks, compiled code, or a `forward` or `__call__` of its own counts as one layer, since a split
    would skip these. Raises UnsupportedModelError if `model` itself is no chain (`is_chain`).
    """
    if not is_chain(model):
        name = type(model).__name__
        text = f"write {name} as an nn.Sequential of its layers (rotor_py.models has examples), to cut it into stages"
        raise UnsupportedModelError(text, kind="not_sequential", name=name)
    return [(path, module) for path, module, opens in _walk("", model) if not opens]


def opened(model: nn.Module) -> tuple[str, ...]:
    """Return the dotted paths of the containers that `layers` splits into their layers; () if `model` is no chain."""
    return tuple(path for path, _, opens in _walk("", model) if opens) if is_chain(model) else ()


def _walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (dotted path, module, whether it is a container to split) of each container and layer."""
    for key, child in module._modules.items():
        if child is not None:
            opens = bool(is_chain(child) and child._modules) and is_called_plainly(child) and not hooks_on_all_modules()
            yield path + key, child, opens
            if opens:
                yield from _walk(f"{path}{key}.", child)


def cut(model: nn.Module, value: Any, device: torch.device) -> Cut:
    """Cut `model` into stages by running it once on the input `value`, layer by layer, without gradients.

    If a layer writes to its input, one stage has all layers from the one that made the overwritten tensor to this one,
    since no stage can be recomputed from an overwritten input. A layer that returns only views of its input joins the
    stage before, since an input takes memory as long as a view of it exists. Leading layers without parameters that
    require gradients form the prefix.

    Raises UnsupportedModelError if `model` is not a nested `nn.Sequential`, has nothing to train, or has a layer that
    returns no tensor or draws random values that cannot be restored. Errors of a layer pass through; a note names it.
    """
    # Gather parameters without mixed precision: FSDP's hooks, which would cast inputs to its dtype, do not run here.
    return cut_layers(layers(model), value, device, sharding_of(model, mixed_precision=False))


def cut_layers(found: list[Layer], value: Any, device: torch.device, sharding: Sharding = _NOTHING) -> Cut:
    """Cut the layers `found`, in execution order, as `cut` does. `sharding`: parameters of theirs to gather."""
    # If the input requires a gradient, there is no prefix, since every layer has a backward.
    trained = (i for i, (_, module) in enumerate(found) if trained_parameters(module))
    leading = 0 if any(tensor.requires_grad for tensor in tensors_in(value)) else next(trained, len(found))
    if leading == len(found):
        text = "set requires_grad on the parameters to train: no parameter of the model and no input needs a gradient"
        raise UnsupportedModelError(text, kind="no_gradient")
    refuse_random_state_of_its_own(found[leading:], device)
    # Clone the input, since the first layer may write to it.
    value = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), with_own_containers(value))
    entered, (leaves, structure) = value, tree_flatten(value)
    iterators = contents_of([each for each in leaves if isinstance(each, Iterator)], set(), copies=False)
    changed_by: str | None = None
    groups: list[list[Layer]] = []
    # Maps the storage address of each tensor in `value` to the index of the group that made the tensor.
    made_by: dict[int, int] = {}
    for position, (name, module) in enumerate(found):
        given = storages(tensors_in(value))
        value, wrote, made_nothing = _run(name, module, value, device, sharding)
        if changed_by is None and not isinstance(entered, torch.Tensor) and position >= leading:
            now, form = tree_flatten(entered)
            same = form == structure and all(map(operator.is_, now, leaves)) and unchanged(iterators)
            changed_by = None if same else name
        if position == leading and wrote:
            text = f"use layer {name!r} without inplace=True: it overwrites the input of the chain"
            raise UnsupportedModelError(text, kind="in_place_input", name=name)
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
        made_by = {**known, **dict.fromkeys(storages(tensors_in(value)).keys() - given.keys(), own)}
    if changed_by is not None:
        _log.warning(
            f"use the model's return value: layer {changed_by!r} changes the {type(entered).__name__} passed to the "
            "model, but in planned steps it changes only a copy",
            extra=record_fields("input_changed", name=changed_by),
        )
    return Cut(tuple(found[:leading]), tuple(joined(group) for group in groups), sharding=sharding)


def refuse_random_state_of_its_own(found: list[Layer], device: torch.device) -> None:
    """Raise UnsupportedModelError for a recurrent module of several layers with dropout between them on CUDA.

    cuDNN draws this dropout from a random state that cannot be restored, so a recomputation would drop other values.
    """
    if device.type != "cuda" or not torch.backends.cudnn.enabled:
        return
    for name, module in found:
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase) and layer.num_layers > 1 and layer.dropout and layer.training:
                raise UnsupportedModelError(
                    f"use single-layer modules with nn.Dropout between them, or torch.backends.cudnn.enabled = False: "
                    f"cuDNN's own random state draws the dropout of {type(layer).__name__} in layer {name!r}",
                    kind="recurrent_dropout",
                    name=name,
                )


def _run(
    name: str, module: nn.Module, value: Any, device: torch.device, sharding: Sharding
) -> tuple[Any, set[int], bool]:
    """Return a layer's output, the addresses of inputs that it wrote to, and whether outputs are views of inputs."""
    inputs, streams, drawn = tensors_in(value), streams_of(module), list[Any]()
    before = [tensor._version for tensor in inputs]

    def drawn_so_far() -> Any:
        return RandomState.now((device,)), [stream.state() for stream in streams]

    def run(value: Any) -> Any:
        with (
            During("first run before measuring", name),
            gathered(module, sharding),
            streams_kept(module),
            isolated(module, device, watch=True),
        ):
            output = module(value)
            drawn.append(drawn_so_far())
            wait_for(output)
            return output

    made, start = made_by(module, attributes=True), drawn_so_far()

    output = None
    with suppress(RuntimeError), torch.no_grad():
        output = run(value)
    if output is None:  # a hook, for example, calls `register_hook` on an output, which fails without a graph
        for tensor in inputs:
            tensor.requires_grad_(tensor.is_floating_point())
        with torch.enable_grad():
            output = run(enter_graph(torch.empty(0, requires_grad=True), value))
    if (new := made()) and drawn[-1] != start:
        # The next run makes nothing: if it draws less, the first drew to make something, and so must the first step.
        with suppress(RuntimeError), torch.no_grad():
            run(value)
        making.update(each[0] for each in (new if drawn[-1] != drawn[0] else ()))
    if not (outputs := tensors_in(output)):
        text = f"let layer {name!r} return a tensor: it returned none, so no gradient would reach it"
        raise UnsupportedModelError(text, kind="no_tensor", name=name)
    # Compare version counters: a write may leave all values as they are, such as an in-place ReLU of positive ones.
    written = [tensor for tensor, version in zip(inputs, before, strict=True) if tensor._version != version]
    made_nothing = storages(outputs).keys() <= storages(inputs).keys()
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output), set(storages(written)), made_nothing


def joined(group: Sequence[Layer]) -> Layer:
    if len(group) == 1:
        return group[0]
    return JOINT.join(name for name, _ in group), nn.Sequential(*(module for _, module in group))


def run_prefix(cut: Cut, value: Any, device: torch.device) -> tuple[Any, PrefixCost | None]:
    """Run the layers of the prefix; return their output, which is the chain's input, and their cost."""
    if not cut.prefix:
        return value, None
    _, modules = joined(cut.prefix)
    # Clone the input, since a layer may write to it.
    value = tree_map_only(torch.Tensor, torch.clone, value)
    with gathered(modules, cut.sharding), isolated(modules, device), torch.no_grad():
        modules(with_own_containers(value))  # warm-up: in the first run, libraries allocate memory that they keep
        with memory_meter(device) as meter:
            output = modules(with_own_containers(value))
        with stopwatch(device) as watch:
            seconds = seconds_of(lambda: modules(with_own_containers(value)), watch)
    (phase,) = meter.phases.values()
    return output, PrefixCost(seconds, max(0, phase.rise - storage_bytes(tensors_in(output))))
