"""Capture a layer of a chain, so that a plan can keep some of the values that it saves, and recompute the others."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor_profiling import RandomState, isolated, leaves_of, tensors_in
from rotor_profiling.attributes import sets_attributes
from rotor_profiling.backends import operators, operators_as_called, prediction
from rotor_profiling.storage import equal
from rotor_profiling.torch_compat import TorchDynamoException
from rotor_py.capture.captured_forward import CapturedForward
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.graph.graph_stage import GraphStage
from rotor_py.capture.tracing import MOST_GRAPHS
from rotor_py.errors import record_fields
from rotor_py.stage.protocol import Run, StageOffers, calling_instead, calls_forward_alone
from rotor_py.stage.saved_tensors import HandingOver, SavedInOrder

_log = logging.getLogger("rotor_py")


class CapturedLayer(StageOffers):
    """Partial storage modes of `layer`: `find` finds them, or `named` names those found for an equal layer, `like`."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        named: Sequence[str] = (),
        *,
        like: CapturedLayer | None = None,
        sharded: bool = False,
    ) -> None:
        self.layer = layer
        self._name = name
        self._named = tuple(named)
        self._like = like
        self._sharded = sharded
        self._forward = CapturedForward(layer, granularity=1, gathered=sharded)
        self._stages: dict[CapturedGraph, GraphStage | None] = {}
        self._warned = False

    def of_kind(self, layer: nn.Module, name: str) -> CapturedLayer:
        return CapturedLayer(layer, name, self._named, like=self, sharded=self._sharded)

    def ways(self) -> tuple[str, ...]:
        return self._named

    def forward_by(self, way: str, *, skip_output: bool = False) -> Run:
        if way not in self._named:
            return super().forward_by(way, skip_output=skip_output)
        return partial(self._run_in_part, way, skip_output)

    def find(self, value: Any, device: torch.device) -> bool:
        """Find partial storage modes on the input `value`, and return whether there are any. Discards all of them if a
        step in one gives other values than the layer (not compared on fake tensors). Leaves the layer unchanged.
        """
        for open_sizes in (True, False):
            self._forward = CapturedForward(self.layer, granularity=1, open_sizes=open_sizes, gathered=self._sharded)
            self._stages.clear()
            cause: str | None = None
            try:
                stage = self._only_stage(value, device)
                self._named = stage.ways() if stage is not None else ()
                if stage is not None and not self._named:  # with constant sizes, the layer would have no mode, either
                    return False
                if self._named:
                    unchecked = prediction() is not None and not self._sharded
                    cause = None if unchecked else self._difference(value, device)
                    if cause is None:
                        return True
            except Exception as error:  # of any type: the layer has run uncaptured before, and can go on so
                cause = str(error)
            if cause is not None:
                why = record_fields("not_in_part", name=self._name)
                _log.debug("layer %s has no partial storage mode: %s", self._name, cause, extra=why)
        self._named = ()
        return False

    def _only_stage(self, value: Any, device: torch.device) -> GraphStage | None:
        """Return the layer as one stage; None unless it is one graph that trains and asks no question about data."""
        graphs: list[CapturedGraph] = []

        def run(graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
            graphs.append(graph)
            with operators():
                stage = self._stage(graph, arguments)
                if stage is not None:
                    stage.ways_for(graph.enter(arguments)[0])
                return graph.run_unplanned(arguments)

        with isolated(self.layer, device), torch.enable_grad(), operators_as_called():
            self._forward.call((leaves_of(value),), {}, run)
        self._let_go()
        if len(graphs) != 1 or self._forward.breaks_at is not None or graphs[0].answers:
            return None
        return self._stages[graphs[0]]

    def _stage(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> GraphStage | None:
        if graph not in self._stages:
            graph.split(arguments)
            found = graph.layers[0][1] if graph.trains and len(graph.layers) == 1 else None
            stage = found if isinstance(found, GraphStage) else None
            known = [*self._stages.values(), *(() if self._like is None else self._like._stages.values())]
            example = next((made for made in known if made is not None), None)
            if stage is not None and example is not None:
                stage.be_stored_like(example)
            self._stages[graph] = stage
        return self._stages[graph]

    def _difference(self, value: Any, device: torch.device) -> str | None:
        """Return how a step in some partial storage mode differs from the layer's own step, as text; None if equal."""
        expected, state, saved = self._step(self.layer, value, device)
        known = len(self._stages)
        if sets_attributes(self.layer):  # the forward changes attributes, so its next run may need another graph
            with isolated(self.layer, device), torch.enable_grad():
                # The second run reads the attributes that the first has changed, and TorchDynamo makes them symbolic.
                for _ in range(3):
                    known = len(self._stages)
                    self.forward_by(self._named[0])(leaves_of(value))
        for way in self._named:
            found, after, saved_then = self._step(self.forward_by(way), value, device)
            same = state == after and len(found) == len(expected)
            if len(self._stages) > known:
                return "TorchDynamo captures another graph in every run"
            if not same or not (prediction() is not None or all(map(equal, found, expected))):
                return "the captured layer computes other values than the layer"
            if saved != saved_then:
                return "the captured layer saves other tensors than the layer"
        return None

    def _step(
        self, run: Run, value: Any, device: torch.device
    ) -> tuple[list[torch.Tensor | None], RandomState, list[Hashable]]:
        """Run a step. Return outputs, gradients and buffers; the random state; keys of saved tensors, if sharded."""
        leaf, saved = leaves_of(value), SavedInOrder()
        with isolated(self.layer, device) as parameters, torch.enable_grad():
            with HandingOver(saved) if self._sharded else nullcontext():
                made = tensors_in(run(leaf))
            # Use each output as its own gradient: a gradient of equal elements could hide an error.
            trained = [tensor for tensor in made if tensor.requires_grad]
            torch.autograd.backward(trained, [tensor.detach().clone() for tensor in trained])
            state = RandomState.now((device,))
            gradients = [tensor.grad for tensor in (*tensors_in(leaf), *parameters)]
            return [*(tensor.detach() for tensor in made), *gradients, *self.layer.buffers()], state, saved.found

    def _run_in_part(self, way: str, skip_output: bool, value: Any) -> Any:
        if not calls_forward_alone(self.layer, but_for_its_hooks=self._sharded):
            self._warn("a hook was registered on it, or its forward was replaced")
            return self.layer(value)

        handed_over: list[CapturedGraph] = []

        def run(graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
            handed_over.append(graph)
            with operators():
                stage = self._stage(graph, arguments)
                if stage is None or way not in stage.ways():
                    self._warn("it runs other operators than when it was measured")
                    return graph.run_unplanned(arguments)
                given, values = graph.enter(arguments)
                return graph.leave(stage.forward_by(way, skip_output=skip_output)(given), values)

        def captured(value: Any) -> Any:
            with operators_as_called():
                return self._forward.call((value,), {}, run)

        try:
            if self._sharded:
                with calling_instead(self.layer, captured):
                    made = self.layer(value)
            else:
                made = captured(value)
        except TorchDynamoException as error:  # raised while TorchDynamo traces, before the layer has run
            self._warn(str(error).partition("\n")[0])
            return self.layer(value)
        finally:
            self._let_go()
        if not handed_over:
            self._warn(f"TorchDynamo captures at most {MOST_GRAPHS} graphs, and runs it uncaptured")
        return made

    def _let_go(self) -> None:
        if self._sharded:
            for graph in self._stages:
                graph.let_go_of_parameters()

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "layer %s stores all saved tensors, not a part: %s. Steps may exceed the limit: call measure() again",
                self._name, cause, extra=record_fields("stored_whole", name=self._name),
            )  # fmt: skip
