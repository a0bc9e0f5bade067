"""Running a model's forward under TorchDynamo, which calls our function with every graph that it captures."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchRuntimeError, Unsupported

from rotor_profiling import tensors_in
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.compiled_models import CompiledForward, HandingGraphsTo, TracedGraph, compile_forward
from rotor_py.capture.data_questions import NOW, Answers, Asking, OtherAnswerError
from rotor_py.capture.graph.run_graph import raise_own_error
from rotor_py.capture.marks.fsdp_marks import FSDPMarks
from rotor_py.capture.replaced.cumulative_batch_norm import batch_norms_in_graphs, has_batch_norms
from rotor_py.capture.replaced.grouped_products import experts_at_once
from rotor_py.capture.replaced.library_masks import masks_asked_about
from rotor_py.capture.tracing.open_numbers import OpenNumbers
from rotor_py.capture.tracing.tracing import Tracing, keep_image_sizes, keep_known_sizes
from rotor_py.distributed.shard_groups import groups_of
from rotor_py.errors import UnsupportedModelError

_log = logging.getLogger("rotor_py")
_NOTHING = nullcontext()

RunGraph = Callable[[CapturedGraph, tuple[Any, ...]], Sequence[Any]]
"""Called with a graph and its inputs; returns its outputs."""


@dataclass(slots=True)
class _Compiled:
    """What calls the model: each of `forwards` is made at its first call, under the marks of a sharded model."""

    marks: FSDPMarks | None
    batch_norms: bool
    """whether there are any: to replace the forward of a class has Python forget what it knows of its attributes"""
    forwards: dict[Answers, CompiledForward] = field(default_factory=dict)


class CapturedForward:
    """The forward of one model, and the graphs that Dynamo made of it so far.

    A sharded model that is `gathered` has whole parameters whenever this is called: it is captured as any other.
    """

    def __init__(self, model: nn.Module, granularity: int, *, open_sizes: bool = True, gathered: bool = False) -> None:
        self.model = model
        self._gathered = gathered
        self.open_sizes = open_sizes
        self._granularity = granularity
        self._compiled: _Compiled | None = None
        self._graphs: dict[TracedGraph, list[CapturedGraph]] = {}
        """For each that was traced, one for every layer that runs it: layers alike may share one that is traced."""
        self.breaks_at: str | None = None
        """The line of the model at which TorchDynamo broke its graph first; None if it broke nowhere."""
        self._told_of_cache = False
        self._numbers = OpenNumbers(model)
        self._answers: Answers = ()
        """How the last batch answered: the next one is likely to answer alike."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the graphs: they are bound to this model, and a copy captures its own."""
        return {**self.__dict__, "_compiled": None, "_graphs": {}}

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_graph: RunGraph,
        recaptured: Callable[[float], None] | None = None,
    ) -> Any:
        """Run the model's forward, with `run_graph` in the place of every graph.

        `recaptured` is called when TorchDynamo makes another graph where there is one already for such answers of the
        data, with the seconds that the last one took; 0 if nobody knows.

        For a sharded model, raises UnsupportedModelError if Dynamo breaks its graph, or if its parameters are gathered
        in a way of their own. An error of the model itself is raised as the model raises it.
        """
        answers = self._answers
        while True:
            asking = Asking(answers)
            try:
                output = self._call(args, kwargs, run_graph, recaptured, asking)
            except OtherAnswerError as other:  # before any stage has run
                answers = asking.corrected(other)
            else:
                self._answers = answers
                return output

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_graph: RunGraph,
        recaptured: Callable[[float], None] | None,
        asking: Asking,
    ) -> Any:
        if self._compiled is None:  # nothing was measured: the plan came from a file, or this is a copy
            self._compiled = self._looked_at()
        compiled, marks = self._compiled, self._compiled.marks

        taken: list[CapturedGraph] = []

        def handle(traced: TracedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
            asking.open = False
            graph = self._captured(traced, arguments, taken, marks)
            # The graph runs inside of `forward.function`, where holes and marks are on the model.
            with marks.unmarked() if marks else nullcontext():
                outputs = run_graph(graph, arguments)
            if self.open_sizes:
                keep_known_sizes(outputs, traced.graph_module.graph)
            return outputs

        def began() -> None:
            if known and self._graphs and recaptured is not None:
                recaptured(forward.seconds)

        now = Tracing(began, self._numbers)
        with (
            HandingGraphsTo(handle, now),
            masks_asked_about(),
            batch_norms_in_graphs() if compiled.batch_norms else _NOTHING,
            experts_at_once(),
            marks.marked() if marks else nullcontext(),
        ):
            known = asking.answers in compiled.forwards
            if not known:
                signature = marks.signature if marks else None
                made = compile_forward(self.model, signature, asking.answers, open_sizes=self.open_sizes)
                compiled.forwards[asking.answers] = made
            forward = compiled.forwards[asking.answers]
            if self.open_sizes:
                keep_image_sizes(tensors_in((args, kwargs)))
            try:
                return forward.function(self.model, args, self._without_cache(kwargs), asking)
            except Unsupported as error:
                if marks is None:
                    raise
                raise self._refusal(error) from error
            except TorchRuntimeError:
                # With marks, the model cannot run by itself: its parameters are holes.
                if marks is None:
                    devices = [p.device for p in self.model.parameters()]
                    raise_own_error(self.model, args, kwargs, devices[0] if devices else torch.device("cpu"))
                raise
            finally:
                self.breaks_at = self.breaks_at or now.breaks_at
                forward.seconds = now.seconds or forward.seconds
                NOW.asking = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Look at the model anew, since it may have changed, and let marks do nothing while it is measured."""
        self._compiled = self._looked_at()
        marks = self._compiled.marks
        if marks is None:
            yield
            return
        self._graphs.clear()  # their stages call the marks that were there before
        marks.measuring = True
        try:
            yield
        finally:
            marks.measuring = False

    def _looked_at(self) -> _Compiled:
        """What the model is like now, and nothing compiled."""
        return _Compiled(None if self._gathered else FSDPMarks.of(self.model), has_batch_norms(self.model))

    def _captured(
        self, traced: TracedGraph, arguments: tuple[Any, ...], taken: list[CapturedGraph], marks: FSDPMarks | None
    ) -> CapturedGraph:
        """The traced graph, for this model: with its parameters, and cut for it; it is then among those `taken`.

        One that this forward has taken with other parameters is not: its stages may run again with those.
        """
        known = self._graphs.setdefault(traced, [])
        found = next((each for each in known if each.has(arguments)), None)
        if found is None:
            found = next((each for each in known if each not in taken), None)
        if found is None:
            # By id: tensors compare element by element.
            buffers = frozenset(id(buffer) for buffer in self.model.buffers())
            found = CapturedGraph(traced.graph_module, buffers, self._granularity, marks)
            known.append(found)
        taken.append(found)
        return found

    def _refusal(self, error: Unsupported) -> UnsupportedModelError:
        cause = str(error).partition("\n")[0].rstrip(".: ")
        return UnsupportedModelError(
            f"fully_shard was applied to {type(self.model).__name__}, but TorchDynamo does not capture its forward as "
            f"one graph: {cause}. Remove what breaks the graph, use DistributedDataParallel, or write the model as an "
            "nn.Sequential of its blocks"
        )

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords with `use_cache=False`, where a model of transformers would use its cache by default.

        Attention fills the cache for the next call of `generate`. Training never reads it, but the caller would hold
        its keys and values to the end of the step. transformers turns it off where it checkpoints, too.
        """
        config = getattr(self.model, "config", None)
        if not getattr(config, "use_cache", False) or "use_cache" in kwargs:
            return kwargs
        if not _takes_use_cache(getattr(self.model.forward, "__func__", self.model.forward)):
            return kwargs
        if not self._told_of_cache:
            self._told_of_cache = True
            _log.info("use_cache is off while training: nothing reads the cache there, and it takes memory")
        return {**kwargs, "use_cache": False}


@lru_cache(maxsize=16)
def _takes_use_cache(forward: Callable[..., Any]) -> bool:
    return "use_cache" in inspect.signature(forward).parameters


def run_as_captured(model: nn.Module) -> Callable[..., Any]:
    """The forward of `model`, its graphs run whole, as TorchDynamo captured them. It has no plan.

    The parameters of a model of `fully_shard` are gathered by stages alone: its own forward is returned.
    """
    if groups_of(model):
        return model.forward
    forward = CapturedForward(model, granularity=1)
    return lambda *args, **kwargs: forward.call(args, kwargs, CapturedGraph.run_unplanned)
