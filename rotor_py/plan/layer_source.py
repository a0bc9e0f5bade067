"""Use the layers of a nesting of `nn.Sequential` as stages."""

from __future__ import annotations

import inspect
from collections.abc import Container, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rotor_profiling import tensors_in
from rotor_profiling.attributes import attributes_kept
from rotor_profiling.backends import operators
from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import FakeTensor, is_fsdp_module
from rotor_py.distributed.sharding import is_sharded
from rotor_py.execute.instructions import Runners
from rotor_py.measure.cut import Cut, cut
from rotor_py.measure.stage_measurer import MeasuredCut, MeasuringOptions, measure
from rotor_py.plan.saved_plan import Plan
from rotor_py.plan.source import Following, SequenceExecutor, Source
from rotor_py.plan.step_spec import covers
from rotor_py.stage.protocol import StageOffers, calls_forward_alone, own_of
from rotor_py.stage.runner import StageRunner

if TYPE_CHECKING:
    from rotor_py.capture.captured_layer import CapturedLayer


# Partial storage of layers. TorchDynamo takes up to seconds to capture a layer, so only one layer of each kind is
# captured, and none that cannot gain: whose operators save little, or that is a single operator.

_LEAST_BYTES = 2**20
"""Least saved bytes of a layer that is captured. A guess: less gains too little for the time that TorchDynamo takes."""
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_OPERATORS = "torch.nn."
"""Packages whose layers are single operators, if they have no layers inside."""


class LayerParts:
    """The storage modes of one model's layers, by module. `fully_shard` may have `sharded` the model."""

    def __init__(self, *, sharded: bool = False) -> None:
        self._sharded = sharded
        self._found: dict[int, CapturedLayer] = {}
        """by the id of the layer, which the value keeps alive"""
        self._kinds: dict[Hashable, CapturedLayer | None] = {}
        """the first layer of a kind, if it can be stored in part"""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle nothing: the entries are bound to these layers, and a copy finds its own."""
        return {**self.__dict__, "_found": {}, "_kinds": {}}

    def look_at(
        self, function: nn.Module, name: str, kind: Hashable, value: Any, device: torch.device, saved_bytes: int
    ) -> None:
        """Find the storage modes of a layer on the input `value`, once for each kind of layer."""
        self._found.pop(id(function), None)
        if kind not in self._kinds:
            gains = saved_bytes >= _LEAST_BYTES and _may_gain(function, value)
            self._kinds[kind] = self._captured(function, name, value, device) if gains else None
        first = self._kinds[kind]
        if first is not None:
            self._found[id(function)] = first if first.layer is function else first.of_kind(function, name)

    def of(self, function: nn.Module) -> StageOffers | None:
        """Return the storage modes found for a layer, or None."""
        return self._found.get(id(function))

    def planned(
        self, function: nn.Module, name: str, ways: Sequence[str], keepers: Container[str]
    ) -> StageOffers | None:
        """Return a layer's storage modes among these `ways`, including those of `keepers`."""
        own = dict.fromkeys(each for each in (own_of(way, keepers) for way in ways) if each is not None)
        if own and id(function) not in self._found:  # the plan comes from a file, or the model is a copy
            from rotor_py.capture.captured_layer import CapturedLayer

            self._found[id(function)] = CapturedLayer(function, name, tuple(own), sharded=self._sharded)
        return self.of(function)

    def _captured(self, function: nn.Module, name: str, value: Any, device: torch.device) -> CapturedLayer | None:
        # Imported late: it imports TorchDynamo, which takes as long as the rest of torch.
        from rotor_py.capture.captured_layer import CapturedLayer

        found = CapturedLayer(function, name, sharded=self._sharded)
        return found if found.find(value, device) else None


def _may_gain(function: nn.Module, value: Any) -> bool:
    """Whether a layer can be captured and may be more than one operator."""
    operator = type(function).__module__.startswith(_OPERATORS) and not function._modules
    tensors = [*function.parameters(), *function.buffers(), *tensors_in(value)]
    plain = all(type(each) in _PLAIN and layout_of(each) is None for each in tensors)
    # Hooks of modules inside the layer come and go. Without hooks, as now, only their class shows FSDP.
    gathered_inside = any(is_fsdp_module(each) for each in function.modules() if each is not function)
    return not operator and plain and not gathered_inside and calls_forward_alone(function)


class LayerSource:
    """The layers of a nesting of `nn.Sequential` as stages."""

    captured = False
    answers = None

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replay = SequenceExecutor(model)
        self._parts = LayerParts(sharded=is_sharded(model))

    def renewed(self) -> LayerSource:
        return LayerSource(self._model)

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the one value that goes into the first layer."""
        if len(arguments) == 1 and not keywords:
            return arguments[0]
        bound = inspect.signature(self._model.forward).bind(*arguments, **keywords)
        (value,) = bound.arguments.values()
        return value

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether `value` is a batch with no more samples. Other sizes are never covered: a layer may do anything."""
        return covers(planned, value)

    def measure(
        self, value: Any, device: torch.device, options: MeasuringOptions, room: Any
    ) -> tuple[list[MeasuredCut], Any]:
        parts = LayerParts(sharded=is_sharded(self._model))
        with operators(), attributes_kept(self._model, caches=False):
            found = cut(self._model, value, device)
            measurement = measure(found, value, device, options, parts)
        # Only now: after an error, the earlier plan stays.
        self._parts, self._replay = parts, SequenceExecutor(self._model)
        return [MeasuredCut(found, measurement)], value

    def follow(self, cut: Cut) -> None:
        """Do nothing: there is one variant, and `run` receives it."""

    def same_graph(self, other: Source) -> bool:
        return True

    def adopt(self, plan: Plan) -> Cut:
        return plan.cut(self._model)

    def run(self, cut: Cut | None, value: Any, how: Following) -> Any:
        assert cut is not None
        for _, layer in cut.prefix:
            value = layer(value)
        return self._replay(cut.stages, partial(self._runners, cut), value, how)

    def _runners(self, cut: Cut, how: Following) -> Runners:
        kept = [keeper.name for keeper in how.keepers]
        made = [
            StageRunner(
                function,
                name,
                how.preserve_rng_state,
                ways=ways,
                keepers=how.keepers,
                offers=self._parts.planned(function, name, ways, kept),
            )
            for (name, function), ways in zip(cut.stages, how.measurement.way_names, strict=True)
        ]
        return Runners.of(made)
