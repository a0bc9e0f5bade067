"""All graphs that TorchDynamo makes of a model: the one that is planned, and what surrounds it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchRuntimeError, Unsupported

from rotor_profiling import LossCost, RandomState, measure_loss, storage_bytes, tensors_in
from rotor_profiling.storage import storages
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.compiled_models import SharedGraph, compiled_for, handled_by
from rotor_py.capture.fsdp_marks import Borders
from rotor_py.capture.run_graph import raise_its_own, run_graph
from rotor_py.capture.saved_outside import Outside
from rotor_py.distributed.whole_parameters import as_left
from rotor_py.errors import PlanMismatchError, UnsupportedModelError
from rotor_py.measure.cut import Cut, Layer, cut_layers, joined
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stages import measure
from rotor_py.stage.graph_effects import recall_effects, remember_effects
from rotor_py.units import format_bytes
from rotor_solver import simulate, store_all
from rotor_solver.progress import Progress

_log = logging.getLogger("rotor_py")
_FRAMES_HOLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""Whether a frame that goes on after a graph break holds on to what went into it: seen in 2.5, not in 2.11 and 2.13."""
_TRIFLE = 0.01
"""Part of what the graphs keep that may be kept outside them."""
_TABLES = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Part:
    """A graph with gradients, measured: cut into stages, and the values that all of them share."""

    graph: CapturedGraph
    cut: Cut
    measurement: Measurement
    shared: tuple[Any, ...]

    @property
    def saved_bytes(self) -> int:
        return sum(stage.saved_bytes for stage in self.measurement.stages)


class CaptureSession:
    """The graphs of one model. `run_stages(cut, value)` runs the stages of the main one by the plan.

    Dynamo calls the graphs in the course of the model's forward. The one that keeps most for its backward is planned;
    others run as they are, and their memory is accounted for.
    """

    def __init__(self, model: nn.Module, run_stages: Callable[[Cut, Any], Any], granularity: int) -> None:
        self.model = model
        self._run_stages = run_stages
        self._granularity = granularity
        self._compiled: Callable[..., Any] | None = None
        self._borders: Borders | None = None
        self._graphs: dict[SharedGraph, CapturedGraph] = {}
        self._call: Callable[[CapturedGraph, tuple[Any, ...]], Sequence[Any]] = self._train
        self.cut_like: Callable[[list[Layer]], Cut] | None = None
        """cuts the layers of a graph as those of the main graph were cut; PlanMismatchError if they are others"""
        self._cuts: dict[int, tuple[CapturedGraph, Cut]] = {}
        self._plain: dict[int, CapturedGraph] = {}
        self._reached = False
        self._said = False

    def __getstate__(self) -> dict[str, Any]:
        """Without the graphs: they are bound to this model, and a copy captures its own."""
        ours = isinstance(self.cut_like, partial)  # else it is that of a plan from a file
        empty: dict[str, Any] = {"_compiled": None, "_borders": None}
        empty |= {"_graphs": {}, "_cuts": {}, "_plain": {}}
        return {**self.__dict__, **empty, "cut_like": None if ours else self.cut_like}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward by the plan."""
        self._reached = False
        self._call = self._train
        if self._compiled is None:  # the plan came from a file
            self._borders = Borders.of(self.model)
        output = self._forward(args, kwargs)
        if not self._reached:
            raise UnsupportedModelError(
                "TorchDynamo did not hand over the model's graph this time, so the step would not have followed the "
                "plan; TORCH_LOGS=recompiles,graph_breaks says why"
            )
        return output

    def measure(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        *,
        loss: Callable[[Any], torch.Tensor] | None,
        progress: Progress | None,
        **options: Any,
    ) -> tuple[Cut, Measurement, tuple[Any, ...]]:
        """Capture and measure all graphs; the main one's stages, the measurement of the whole step, and the values
        that all stages share. Nothing of the model is changed.
        """
        parts: list[_Part] = []
        outside = Outside(set(storages([*self.model.parameters(), *self.model.buffers()])))

        def run(graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
            with outside.suspended():
                return measured(graph, arguments)

        def measured(graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
            graph.split(arguments)
            if not graph.trains:
                with torch.no_grad():
                    return self._as_it_is(graph, arguments)
            value, values = graph.enter(arguments)
            found = replace(cut_layers(graph.layers, value, device), input_owned=True)
            made: list[Any] = []
            measurement = measure(
                found, value, device, progress=progress, silent=graph.silent, done=made.append, **options
            )
            measurement = replace(measurement, prefix=graph.context_cost(arguments, device))
            parts.append(_Part(graph, found, measurement, value))
            return graph.leave(made[0], values)

        self._compiled = None  # the model may have been changed
        self._call = run
        state = RandomState.now((device,))
        with _attributes_kept(self.model), self._measuring():
            try:
                with outside:
                    output = self._forward(args, kwargs)
                output = as_left(self.model, output)
            finally:
                self._call = self._train
                state.restore()
        self._refuse_outside(outside, sum(part.saved_bytes for part in parts))
        if not parts:
            raise UnsupportedModelError(
                f"TorchDynamo found no graph with a gradient in the forward of {type(self.model).__name__}; "
                "TORCH_LOGS=graph_breaks says why"
            )
        main = max(parts, key=lambda part: part.saved_bytes)
        self.cut_like = partial(_cut_like, replace(main, shared=()))  # they are an input's memory
        self._cuts = {id(main.graph): (main.graph, main.cut)}
        self._plain = {id(part.graph): part.graph for part in parts if part is not main}
        at = parts.index(main)
        measurement = _with_others(main.measurement, parts[:at], parts[at + 1 :], outside.total_bytes)
        cost = measure_loss(loss, output, device=device, output_bytes=_held(output)) if loss is not None else None
        if cost is not None:
            before = measurement.loss
            cost = LossCost(
                before.seconds + cost.seconds, before.temp_bytes + cost.temp_bytes, before.kept_bytes + cost.kept_bytes
            )
            measurement = replace(measurement, loss=cost)
        return main.cut, measurement, main.shared

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Sharded parameters are gathered stage by stage."""
        borders = self._borders = Borders.of(self.model)
        if borders is not None:
            borders.measuring = True
            self._graphs.clear()  # their marks are those of other borders
        try:
            yield
        finally:
            if borders is not None:
                borders.measuring = False

    def _refusal(self, error: Unsupported) -> UnsupportedModelError:
        """What TorchDynamo says, in a sentence."""
        said = str(error).partition("\n")[0].rstrip(".: ")
        return UnsupportedModelError(
            f"fully_shard was applied to {type(self.model).__name__}, and TorchDynamo does not capture its forward as "
            f"one graph, which that takes: {said}; take that out of the forward, use DistributedDataParallel, or write "
            "the model as an nn.Sequential of its blocks"
        )

    def _refuse_outside(self, outside: Outside, captured_bytes: int) -> None:
        """UnsupportedModelError if more than a trifle is kept by what no graph has: it can be neither planned nor
        promised.
        """
        if outside.total_bytes > _TRIFLE * captured_bytes:
            raise UnsupportedModelError(
                f"{outside.line} of {type(self.model).__name__} runs outside the graphs that TorchDynamo captures, and "
                f"keeps {format_bytes(outside.total_bytes)} for the backward, which cannot be planned "
                f"({format_bytes(captured_bytes)} can); TORCH_LOGS=graph_breaks says why the graph breaks there"
            )

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        borders = self._borders
        # Inside DistributedDataParallel, Dynamo would cut the graph at the ends of buckets.
        with (
            handled_by(self._handle),
            torch._dynamo.config.patch(optimize_ddp=False),
            borders.marked() if borders else nullcontext(),
        ):
            if self._compiled is None:
                self._compiled = compiled_for(self.model, borders.signature if borders else None)
            try:
                return self._compiled(self.model, args, self._without_cache(kwargs))
            except Unsupported as error:
                if borders is None:
                    raise
                raise self._refusal(error) from error
            except TorchRuntimeError:
                if borders is not None:
                    raise
                devices = [p.device for p in self.model.parameters()]
                raise_its_own(self.model, args, kwargs, devices[0] if devices else torch.device("cpu"))
                raise

    def _handle(self, shared: SharedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
        if shared not in self._graphs:
            buffers = frozenset(id(buffer) for buffer in self.model.buffers())
            self._graphs[shared] = CapturedGraph(
                shared.graph_module, buffers, self._granularity, self._run_graph, self._borders
            )
        with self._borders.unmarked() if self._borders else nullcontext():
            return self._graphs[shared](*arguments)

    def _run_graph(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
        return self._call(graph, arguments)

    def _train(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """Run a graph: by the plan if it is the main one, or the same for other shapes."""
        if id(graph) in self._plain or not torch.is_grad_enabled():
            return self._as_it_is(graph, arguments)
        graph.split(arguments)
        if not graph.trains:
            return self._as_it_is(graph, arguments)
        if id(graph) not in self._cuts and not self._adopt(graph):
            return self._as_it_is(graph, arguments)
        value, values = graph.enter(arguments)
        self._reached = True
        return graph.leave(self._run_stages(self._cuts[id(graph)][1], value), values)

    def _as_it_is(self, graph: CapturedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """Run a graph without a plan."""
        if self._borders is not None:
            raise UnsupportedModelError(
                f"nothing in the graph of {type(self.model).__name__} has a gradient, and fully_shard was applied to "
                "it; train some of its parameters, or call it in eval mode"
            )
        return list(run_graph(graph.graph_module, arguments))

    def _adopt(self, graph: CapturedGraph) -> bool:
        """Use the plan of the main graph for the same graph of other shapes; False if it is another graph, after it."""
        assert self.cut_like is not None
        try:
            self._cuts[id(graph)] = graph, replace(self.cut_like(graph.layers), input_owned=True)
        except PlanMismatchError:
            if not self._reached:
                raise
            self._plain[id(graph)] = graph
            return False
        return True

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keys and values of attention for a later call, which models of transformers return unless told not to."""
        config = getattr(self.model, "config", None)
        if not getattr(config, "use_cache", False) or "use_cache" in kwargs:
            return kwargs
        if "use_cache" not in inspect.signature(self.model.forward).parameters:
            return kwargs
        if not self._said:
            self._said = True
            _log.info("use_cache is off while training: what it keeps is of no use there, and takes memory")
        return {**kwargs, "use_cache": False}


def _cut_like(main: _Part, layers: list[Layer]) -> Cut:
    found = dict(layers)
    if list(found) != [name for name, _ in main.graph.layers]:
        raise PlanMismatchError(
            "the captured graph", f"{len(main.graph.layers)} pieces", f"{len(found)} pieces, or others"
        )
    stages = tuple(joined([(name, found[name]) for name in group]) for group in main.cut.groups())
    for (_, stage), (_, measured) in zip(stages, main.cut.stages, strict=True):
        remember_effects(stage, recall_effects(measured))
    return Cut(tuple((name, found[name]) for name, _ in main.cut.prefix), stages)


def _with_others(main: Measurement, before: list[_Part], after: list[_Part], outside: int) -> Measurement:
    """The measurement of the main graph, with what the graphs before and after it keep and need, and what is kept
    outside graphs.
    """
    seconds, temp, kept = main.loss.seconds, main.loss.temp_bytes, main.loss.kept_bytes + outside
    if after and _FRAMES_HOLD:
        kept += main.stages[-1].activation_bytes
    for part in after:
        chain = part.measurement.chain(fresh_gradients=True)
        whole = simulate(chain, store_all(chain))
        seconds, temp = seconds + whole.makespan, temp + whole.peak
        kept += sum(part.measurement.gradient_bytes)  # they are there while the main graph goes backward
    if after:  # they make the gradient that the main graph's backward begins with, and a loss is counted beside it
        temp = max(0, temp - main.stages[-1].activation_bytes)
    kept += sum(part.saved_bytes for part in before)
    return replace(main, loss=LossCost(seconds, temp, kept))


def _held(output: Any) -> int:
    """Bytes of the tensors that get a gradient."""
    return storage_bytes(tensor for tensor in tensors_in(output) if tensor.requires_grad)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back what a forward may set on modules, parameters and buffers aside."""
    before = [(vars(module), {k: v for k, v in vars(module).items() if k not in _TABLES}) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            for key in [key for key in attributes if key not in _TABLES and key not in kept]:
                del attributes[key]
            attributes.update(kept)
