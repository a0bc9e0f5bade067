"""Run one model's captured graphs in training. Only the graph that saves most bytes for its backward (the main one) is
planned: a plan is for one chain of stages. Other graphs store everything, which the plan allows for.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from rotor_profiling import RandomState
from rotor_profiling.attributes import Attributes
from rotor_profiling.isolate import Buffers, Undoing, accelerators_of
from rotor_profiling.torch_compat import TorchDynamoException, tree_leaves
from rotor_py.capture.captured_forward import CapturedForward
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.graph.graph_stage import GraphStage
from rotor_py.capture.measure_graphs import is_users, measure_graphs
from rotor_py.capture.patches import Answers
from rotor_py.capture.tracing import MOST_GRAPHS
from rotor_py.capture.variants import CompileBudgetOf, whole_step
from rotor_py.compile.compiled_stage import CompiledStage, StageCompiler
from rotor_py.errors import OtherDataError, PlanMismatchError, UnsupportedModelError, record_fields
from rotor_py.measure.cut import Cut, Layer, joined
from rotor_py.measure.stage_measurer import MeasuredCut, MeasuringOptions
from rotor_py.stage.forward_state import recall_effects, recall_moving, remember_effects, remember_moving
from rotor_py.stage.named_state import NamedState, locations_in
from rotor_py.stage.protocol import offers_of
from rotor_py.stage.replayed_routing import Stream, streams_among, streams_of

_log = logging.getLogger("rotor_py")
RunStages = Callable[[Cut, Any], Any]

# If a forward reaches another graph than the planned one, this graph is planned, and the forward starts again. Before a
# forward's first graph, only TorchDynamo has run, which may draw from Python's random stream. After a graph break, the
# model's code has run, too: then the forward goes on unplanned, and later forwards first copy the model's state.

_branching: WeakSet[nn.Module] = WeakSet()  # models that have reached an unplanned graph after a graph break
_uncaptured: WeakSet[nn.Module] = WeakSet()  # models for which the warning about a forward without graph was logged


class CaptureSession:
    def __init__(self, model: nn.Module, granularity: int) -> None:
        self.model = model
        self._granularity = granularity
        self._forward = CapturedForward(model, granularity)
        # Set if the plan is from a file: cuts layers into its stages, or raises PlanMismatchError if they differ.
        self.cut_layers: Callable[[list[Layer]], Cut] | None = None
        # Answers about the batch's data that the planned graph assumes (Note in `patches.py`); None without a plan.
        self.answers: Answers | None = None
        self._main: CapturedGraph | None = None
        # Maps the main graph, and the same graph for other input shapes, to their stages.
        self._planned: dict[CapturedGraph, Cut] = {}
        self._unplanned: set[CapturedGraph] = set()
        self._followed_plan = False  # whether the current (or last) forward has reached a planned graph
        self._went_on = False  # whether this forward has run an unplanned graph in place of the planned one
        # Restores the state before this forward; None once a planned graph has run.
        self._undo: Undoing | None = None
        self._undoes_all = False  # whether it restores more than random streams, from which tracing may draw
        self._streams: list[Stream] | None = None  # random streams of Python, NumPy and the model; finding them is slow

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_main": None,
            "_planned": {},
            "_unplanned": set(),
            "_undo": None,
            "_streams": None,
        }

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_stages: RunStages,
        recaptured: Callable[[], None],
        *,
        goes_on: bool = False,
    ) -> Any:
        """Run the model's forward; `run_stages(cut, value)` runs the stages of the main graph by the plan. Logs a
        warning if TorchDynamo captures no graph. If it captures another graph than the planned one, puts back the state
        before the forward and raises PlanMismatchError, or OtherDataError if the batch's data led there. If the state
        cannot be put back, or if `goes_on`, runs the other graph unplanned, and logs a warning.
        """
        self._followed_plan = self._went_on = False
        if self._streams is None:
            self._streams = streams_of(self.model)
        streams = (*self._streams, *streams_among(tree_leaves((args, kwargs))))
        self._undo = [partial(stream.set, stream.state()) for stream in streams]
        self._undoes_all = self.model in _branching
        if self._undoes_all:
            random = RandomState.now(accelerators_of((), self.model))
            self._undo += [Buffers(self.model).put_back, Attributes(self.model).put_back, random.restore]
            self._undo.append(NamedState(locations_in((args, kwargs))).put_back)
        run_graph = partial(self._run_graph, run_stages, goes_on)
        try:
            with self._refusing():
                output = self._forward.call(args, kwargs, run_graph, recaptured, self._put_back)
        except PlanMismatchError:
            self._put_back()
            raise
        finally:
            self._undo = None
        if not (self._followed_plan or self._went_on or self.model in _uncaptured):
            _uncaptured.add(self.model)
            breaks_at = self._forward.breaks_at
            _log.warning(
                "TorchDynamo captured no graph of %s, so steps may exceed the limit; it captures at most %s graphs, "
                "and TORCH_LOGS=recompiles,graph_breaks shows why it captured each%s",
                type(self.model).__name__, MOST_GRAPHS, f". The graph breaks at {breaks_at}" if breaks_at else "",
                extra=record_fields("unplanned_graph", name=breaks_at),
            )  # fmt: skip
        return output

    def measure(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        options: MeasuringOptions,
        *,
        compiler: StageCompiler | None = None,
        room: CompileBudgetOf | None = None,
    ) -> tuple[list[MeasuredCut], tuple[Any, ...]]:
        """Capture and measure all graphs, with symbolic sizes if possible; leave the model unchanged. Return a list of
        measured variants of the main graph, with the costs of a whole step, and the values that all stages share. With
        a `compiler`, the first variants are compiled. The last is not; forwards run it until `follow` sets another.
        """
        self._streams = None
        measure = partial(
            measure_graphs, args=args, kwargs=kwargs, device=device, options=options, compiler=compiler, room=room
        )
        cause: str | None = None
        try:
            found = measure(self._forward)
        except (UnsupportedModelError, TorchDynamoException) as error:
            if not self._forward.open_sizes:
                raise
            cause = str(error).partition("\n")[0]
        if cause is not None:
            # Try again outside the `except` block: inside it, the error's traceback keeps tensors alive.
            self._forward = CapturedForward(self.model, self._granularity, open_sizes=False)
            with self._refusing():
                found = measure(self._forward)
            _log.info(
                "each shape has a graph, as sizes cannot be symbolic: %s", cause, extra=record_fields("graph_per_shape")
            )
        main = found.main
        # Keep only the graph: `found` holds the values that all stages share, which may be as large as an input.
        self._main = main.graph
        # Only the first graph asks questions about data, but another graph may be the main one.
        self.answers = next((each.graph.answers for each in found.graphs if each.graph.answers), ())
        self._unplanned = {each.graph for each in found.graphs if each is not main}
        ways = [MeasuredCut(each.cut, whole_step(found, each.measurement)) for each in (*found.variants, main)]
        self.follow(ways[-1].cut)
        return ways, main.shared

    def follow(self, cut: Cut) -> None:
        assert self._main is not None
        self._main.remember_written(cut)
        self._planned = {self._main: cut}  # drop the cuts for other shapes: `_follows_plan` makes new ones

    def same_graph(self, other: CaptureSession) -> bool:
        """Whether the main graphs of both sessions have the same operators, possibly for different sizes."""
        return self._main is not None and other._main is not None and self._main.same_as(other._main)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Replace TorchDynamo's errors, which are long, by UnsupportedModelError with the model's source line."""
        try:
            yield
        except TorchDynamoException as error:
            stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
            theirs = [frame for frame in stack if is_users(frame.filename)]
            line = f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else None
            cause, name = str(error).partition("\n")[0].rstrip(": "), type(self.model).__name__
            raise UnsupportedModelError(
                f"TorchDynamo cannot capture {name}{f' at {line}' if line else ''}: {cause}. Plan the part that it "
                "can capture, as in model.body = Checkpointable(model.body, ...)",
                kind="not_captured",
                name=line or name,
            ) from error

    def _put_back(self) -> None:
        for undo in self._undo or ():
            undo()

    def _run_graph(
        self, run_stages: RunStages, goes_on: bool, graph: CapturedGraph, arguments: tuple[Any, ...]
    ) -> Sequence[Any]:
        # Gradients are off in code that the model runs under `no_grad`, which TorchDynamo captures as another graph.
        if graph in self._unplanned or not torch.is_grad_enabled():
            return graph.run_unplanned(arguments)
        graph.split(arguments, self._main)
        if not graph.layers:
            return graph.run_unplanned(arguments)
        # Run the context before `_follows_plan`, since the context raises OtherAnswerError if the batch needs another
        # graph. But if the context writes into inputs, run it only once it is clear that the graph follows the plan.
        entered = graph.enter(arguments) if graph.overwriting is None else None
        if not self._follows_plan(graph, goes_on):
            return graph.run_unplanned(arguments)
        value, values = entered or graph.enter(arguments)
        self._followed_plan, self._undo = True, None
        return graph.leave(run_stages(self._planned[graph], value), values)

    def _follows_plan(self, graph: CapturedGraph, goes_on: bool) -> bool:
        """Whether the plan fits this graph. If not, and if the forward can start again, raises PlanMismatchError."""
        if graph in self._planned:
            return True
        try:
            # Graphs for different data may have operators of equal names: attention with a mask, and without one.
            if self.answers is not None and graph.answers not in ((), self.answers):
                raise OtherDataError(self.answers, graph.answers)
            if self._main is not None:
                cut = _cut_like(self._main, self._planned[self._main], graph)
            else:
                assert self.cut_layers is not None
                cut = self.cut_layers(graph.layers)
            self._planned[graph] = replace(cut, input_owned=True)
            graph.remember_written(self._planned[graph])
        except PlanMismatchError:
            known = False
            if self._undo is None:  # the planned graph has already run
                known = any(map(graph.same_as, self._unplanned))
                self._unplanned.add(graph)
            elif not (goes_on or self._went_on) and (self._undoes_all or self._forward.breaks_at is None):
                raise
            else:
                _branching.add(self.model)
                known, self._went_on = self._went_on, True
            if not known:
                breaks_at = self._forward.breaks_at
                _log.warning(
                    "%s runs a graph for which there is no plan, so this step may exceed the limit%s",
                    type(self.model).__name__,
                    "" if breaks_at is None else f"; code before the graph break at {breaks_at} selects the graph",
                    extra=record_fields("unplanned_graph", name=breaks_at),
                )
            return False
        return True


def _cut_like(main: CapturedGraph, cut: Cut, graph: CapturedGraph) -> Cut:
    """Cut `graph` into stages as `cut` cuts `main`. Raises PlanMismatchError if they differ in more than sizes."""
    # Do not compare names only: for small inputs, a model may run other operators in the same modules.
    names = [[name for name, _ in each.layers] for each in (main, graph)]
    if names[0] != names[1] or not graph.same_as(main):
        pieces = [f"{len(each.layers)} pieces" for each in (main, graph)]
        raise PlanMismatchError("the captured graph", pieces[0], f"{pieces[1]}, or others")
    found = dict(graph.layers)
    stages: list[Layer] = []
    for group, (_, measured) in zip(cut.groups(), cut.stages, strict=True):
        name, stage = joined([(name, found[name]) for name in group])
        if isinstance(measured, CompiledStage):
            stage = measured.like(stage)
        # What was measured about a stage's effects on buffers and outputs holds for other shapes, too.
        remember_effects(stage, recall_effects(measured))
        remember_moving(stage, recall_moving(measured))
        if isinstance(measured, GraphStage) and isinstance(stage, GraphStage):
            stage.be_stored_like(measured)
        missing = set(offers_of(measured).ways()) - set(offers_of(stage).ways())
        if missing:  # the plan may use these storage modes, which the stage of `main` has
            raise PlanMismatchError(f"stage {name}", f"one that can be stored {min(missing)}", "one that cannot")
        stages.append((name, stage))
    return Cut(tuple((name, found[name]) for name, _ in cut.prefix), tuple(stages))
