"""The layers of a nesting of `nn.Sequential`, as they stand."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from rotor_profiling.attributes import attributes_kept
from rotor_profiling.instruments import operators
from rotor_py.distributed.whole_parameters import is_sharded
from rotor_py.measure.cut import Cut, cut
from rotor_py.measure.stages import MeasuredCut, measure
from rotor_py.plan.inputs.input_spec import covers
from rotor_py.plan.saved.plan import Plan
from rotor_py.plan.sources.layer_parts import LayerParts
from rotor_py.plan.sources.running import Replay, measuring_options
from rotor_py.plan.sources.source import Following, Measured, Measuring, Source
from rotor_py.stage.runner import StageRunner


class LayerSource:
    """The layers of a nesting of `nn.Sequential`, as they stand."""

    captured = False
    answers = None

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replay = Replay(model)
        self._parts = LayerParts(sharded=is_sharded(model))

    def renewed(self) -> LayerSource:
        return LayerSource(self._model)

    def input_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The one value that goes into the first layer."""
        if len(arguments) == 1 and not keywords:
            return arguments[0]
        bound = inspect.signature(self._model.forward).bind(*arguments, **keywords)
        (value,) = bound.arguments.values()
        return value

    def covers(self, planned: Any, value: Any) -> bool:
        """Whether `value` is a batch with no more samples. Of other sizes nothing is known: a layer may do anything."""
        return covers(planned, value)

    def measure(self, value: Any, how: Measuring) -> Measured:
        parts = LayerParts(sharded=is_sharded(self._model))
        with operators(), attributes_kept(self._model, caches=False):
            found = cut(self._model, value, how.device)
            measurement = measure(
                found,
                value,
                how.device,
                layer_offers=parts,
                **measuring_options(self._model, how),
            )
        self._parts = parts  # only now: after an error, the plan that there was goes on
        return Measured([MeasuredCut(found, measurement)], value)

    def follow(self, cut: Cut) -> None:
        """There is one way, and `run` is given it."""

    def same_graph(self, other: Source) -> bool:
        return True

    def adopt(self, plan: Plan) -> Cut:
        return plan.cut(self._model)

    def run(self, cut: Cut | None, value: Any, how: Following) -> Any:
        assert cut is not None
        for _, layer in cut.prefix:
            value = layer(value)
        kept = [keeper.name for keeper in how.keepers]
        runners = [
            StageRunner(
                function,
                name,
                how.preserve_rng_state,
                ways=ways,
                keepers=how.keepers,
                offers=self._parts.planned(function, name, ways, kept),
            )
            for (name, function), ways in zip(cut.stages, how.ways, strict=True)
        ]
        return self._replay(runners, value, how)
