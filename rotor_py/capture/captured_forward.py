"""Run a model's forward under TorchDynamo, which calls our backend with every graph that it captures."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import fx, nn

from rotor_profiling import tensors_in, torch_compat
from rotor_profiling.backends import prediction
from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import TorchRuntimeError, Unsupported, dispatch_mode_stack
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.fsdp_markers import FSDPMarks
from rotor_py.capture.graph.stage_graph import raise_own_error, run_graph
from rotor_py.capture.guarded_branches import NOW, Answers, Asking, OtherAnswerError
from rotor_py.capture.patches import batch_norms_in_graphs, experts_at_once, has_batch_norms, masks_asked_about
from rotor_py.capture.tracing import OpenNumbers, Tracing, keep_image_sizes, keep_known_sizes
from rotor_py.distributed.sharding import groups_of
from rotor_py.errors import UnsupportedModelError, record_fields
from rotor_py.stage.forward_state import Autocast

# Models built alike share one compiled forward and its traced graphs: tracing a large model takes seconds, and tests,
# sweeps over limits and copies of a model would each pay for it.

Handler = Callable[["TracedGraph", tuple[Any, ...]], Sequence[Any]]

_MOST = 32
"""Compiled forwards kept, by last use. A guess: each holds traced graphs, so more costs memory, and fewer costs tracing
again.
"""
_ALONE = "isolate_recompiles"
"""Option of `torch.compile` in newer releases. After a graph break, TorchDynamo resumes in library functions that other
models call as well, and caches by code object. Isolated, a capture does not see their versions. Otherwise these count
against its limit, and their guards fail with a KeyError on a model that lacks the guarded attributes.
"""
_alone: dict[str, Any] = {_ALONE: True} if _ALONE in inspect.signature(torch.compile).parameters else {}
_compiled: OrderedDict[Hashable, CompiledForward] = OrderedDict()


class _Receiver(NamedTuple):
    """Runs the graphs that are called in this context, and watches tracing."""

    run: Handler
    tracing: Tracing


_receiver: ContextVar[_Receiver | None] = ContextVar("receiver", default=None)


class TracedGraph:
    """A graph traced by Dynamo. Models built alike may share it, so the current receiver says how it runs."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        receiver = _receiver.get()
        # A user's own torch.compile may come here where torch cannot isolate captures: TorchDynamo caches by code
        # object, and a function at its limit of versions runs one that fits, whichever backend made it.
        return run_graph(self.graph_module, arguments) if receiver is None else receiver.run(self, arguments)


@dataclass(slots=True)
class CompiledForward:
    """A function (model, args, kwargs, asking) that TorchDynamo traces when it is called."""

    function: Callable[..., Any]
    seconds: float = 0.0
    """Time of the last tracing."""


def compile_forward(
    model: nn.Module, marks: Hashable = None, answers: Answers = (), *, open_sizes: bool = True
) -> CompiledForward:
    """Return the compiled forward of `model`, shared by models that are built alike.

    With `open_sizes`, graphs have symbols for the sizes of inputs; without, each is for one shape. Each `answers` of
    `asking` has its own function: TorchDynamo would count another one as a recompilation. `marks` says where modules of
    `fully_shard` begin and end. A model with marks is captured as one graph or not at all: between two graphs its own
    code would run on holes instead of parameters. A graph break then raises torch's `Unsupported`.
    """
    key = _structure(model), marks, answers, open_sizes
    # `model` is an argument of the function, not a part of it, so a function keeps no model alive.
    if key not in _compiled:
        _compiled[key] = CompiledForward(_traced_when_called(fullgraph=marks is not None, dynamic=open_sizes))
    _compiled.move_to_end(key)
    if len(_compiled) > _MOST:
        _compiled.popitem(last=False)
    return _compiled[key]


class HandingGraphsTo:
    """Context in which `handler` runs the graphs that are called, and `tracing` watches new ones being traced.

    Held in a context variable: models built alike share a function, and may train in several threads at once.
    """

    __slots__ = ("_receiver", "_token")

    def __init__(self, handler: Handler, tracing: Tracing) -> None:
        self._receiver = _Receiver(handler, tracing)

    def __enter__(self) -> None:
        self._token = _receiver.set(self._receiver)

    def __exit__(self, *_: object) -> None:
        _receiver.reset(self._token)


def _backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> TracedGraph:
    receiver = _receiver.get()
    if receiver is not None:
        receiver.tracing.begin()
    return TracedGraph(graph_module)


def _tracing_as_noted(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TorchDynamo's `callback`, called where no graph fits, with the settings of `Tracing`."""

    # Copy the callback's attributes, by which TorchDynamo knows the backend. Python code must not look them up:
    # TorchDynamo reads them while every frame still goes to the callback.
    @functools.wraps(callback)
    def trace(*args: Any, **kwargs: Any) -> Any:
        receiver = _receiver.get()
        if receiver is not None and prediction() is None:
            _refuse_modes()
        with nullcontext() if receiver is None else receiver.tracing.as_the_note_says():
            return callback(*args, **kwargs)

    return trace


def _refuse_modes() -> None:
    """Raise UnsupportedModelError inside a dispatch mode of the caller under which TorchDynamo traces nothing.

    It would run the function uncompiled, in this step and all that follow.
    """
    modes = [mode for mode in dispatch_mode_stack() if not _is_torchs_own(mode)]
    if modes:
        names = " and ".join(type(mode).__name__.lstrip("_") for mode in modes)
        raise UnsupportedModelError(
            f"inside of {names}, TorchDynamo captures nothing, and for this step it would have to capture the model "
            "anew; leave that out of training steps, or use it around the model itself, the attribute `model`",
            kind="capture_suspended",
            name=names,
        )


def _is_torchs_own(mode: Any) -> bool:
    """Whether TorchDynamo traces under this mode, by the flags that this release of torch checks."""
    return any(getattr(mode, word, bool)() for word in ("is_infra_mode", "ignore_compile_internals"))


def _traced_when_called(*, fullgraph: bool, dynamic: bool) -> Callable[..., Any]:
    """Return `_own_function` under TorchDynamo, traced with the settings of the Note in `tracing.py`."""
    # Does what `torch.compile` does, which does not expose its context with the callback.
    backend = torch_compat.TorchCompileWrapper(_backend, None, None, dynamic)
    context: Any = torch_compat.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **_alone)
    if hasattr(context, "callback"):  # absent where TorchDynamo is switched off
        context.callback = _tracing_as_noted(context.callback)
    function: Callable[..., Any] = context(_own_function())
    return function


def _structure(model: nn.Module) -> Hashable:
    """Return a key that is equal for models that may share code.

    Dynamo's guards would separate unlike models as well, but a function has a limit of versions, beyond which Dynamo
    runs it uncompiled.
    """
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    # `remove_duplicate=False`: a model with two tied weights differs from one where they are not tied.
    kinds = tuple((name, t.shape, t.dtype, t.device, t.requires_grad, layout_of(t)) for name, t in tensors)
    return modules, kinds, tuple(map(Autocast.now, ("cpu", "cuda")))


def _own_function() -> Callable[..., Any]:
    """Return a function with a code object of its own: Dynamo limits recompilations by code object."""

    def forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asking: Asking) -> Any:
        NOW.asking = asking  # set inside the traced code
        return model.forward(*args, **kwargs)

    return FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)


_log = logging.getLogger("rotor_py")
_NOTHING = nullcontext()

RunGraph = Callable[[CapturedGraph, tuple[Any, ...]], Sequence[Any]]
"""Called with a graph and its inputs; returns its outputs."""


@dataclass(slots=True)
class _Compiled:
    """The compiled forwards of a model, each made at its first call, and the marks of a sharded model."""

    marks: FSDPMarks | None
    batch_norms: bool
    """Whether the model has batch norms. Replacing a class's forward invalidates Python's attribute caches."""
    forwards: dict[Answers, CompiledForward] = field(default_factory=dict)


class CapturedForward:
    """The forward of one model, with the graphs that Dynamo captured so far.

    A `gathered` sharded model has whole parameters at every call, so it is captured as any other.
    """

    def __init__(self, model: nn.Module, granularity: int, *, open_sizes: bool = True, gathered: bool = False) -> None:
        self.model = model
        self._gathered = gathered
        self.open_sizes = open_sizes
        self._granularity = granularity
        self._compiled: _Compiled | None = None
        self._graphs: dict[TracedGraph, list[CapturedGraph]] = {}
        """Per traced graph, one entry for each layer that runs it: layers built alike may share a traced graph."""
        self.breaks_at: str | None = None
        """Line of the model's first graph break; None without breaks."""
        self._told_of_cache = False
        self._numbers = OpenNumbers(model)
        self._answers: Answers = ()
        """The last batch's answers, assumed for the next."""

    def __getstate__(self) -> dict[str, Any]:
        """Drop the graphs: they are bound to this model, and a copy captures its own."""
        return {**self.__dict__, "_compiled": None, "_graphs": {}}

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_graph: RunGraph,
        recaptured: Callable[[float], None] | None = None,
    ) -> Any:
        """Run the model's forward, with `run_graph` in place of every graph.

        `recaptured` is called when TorchDynamo captures another graph for known answers, with the seconds that the last
        capture took; 0 if unknown.

        Raises UnsupportedModelError for a sharded model whose graph breaks, or whose parameters cannot be replaced by
        holes. The model's own errors pass through unchanged.
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
        if self._compiled is None:  # not measured: the plan came from a file, or this is a copy
            self._compiled = self._looked_at()
        compiled, marks = self._compiled, self._compiled.marks

        taken: list[CapturedGraph] = []

        def handle(traced: TracedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
            asking.open = False
            graph = self._captured(traced, arguments, taken, marks)
            # The graph runs inside `forward.function`, while holes and marks are on the model.
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
                # With marks, the model cannot run uncaptured: its parameters are holes.
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
        """Look at the model anew, since it may have changed, and disable its marks during measurement."""
        self._compiled = self._looked_at()
        marks = self._compiled.marks
        if marks is None:
            yield
            return
        self._graphs.clear()  # their stages call the old marks
        marks.measuring = True
        try:
            yield
        finally:
            marks.measuring = False

    def _looked_at(self) -> _Compiled:
        """Return the model's present marks and batch norms, with nothing compiled."""
        return _Compiled(None if self._gathered else FSDPMarks.of(self.model), has_batch_norms(self.model))

    def _captured(
        self, traced: TracedGraph, arguments: tuple[Any, ...], taken: list[CapturedGraph], marks: FSDPMarks | None
    ) -> CapturedGraph:
        """Return the traced graph bound to this model's parameters, and add it to `taken`.

        A graph that this forward already took with other parameters is not reused: its stages may be recomputed with
        those.
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
            "nn.Sequential of its blocks",
            kind="graph_break",
        )

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add `use_cache=False` where a transformers model would fill its cache by default.

        Training never reads the cache, but the caller would hold its keys and values to the end of the step.
        transformers also disables it under checkpointing.
        """
        config = getattr(self.model, "config", None)
        if not getattr(config, "use_cache", False) or "use_cache" in kwargs:
            return kwargs
        if not _takes_use_cache(getattr(self.model.forward, "__func__", self.model.forward)):
            return kwargs
        if not self._told_of_cache:
            self._told_of_cache = True
            _log.info(
                "use_cache is off while training: nothing reads the cache there, and it takes memory",
                extra=record_fields("cache_off"),
            )
        return {**kwargs, "use_cache": False}


@lru_cache(maxsize=16)
def _takes_use_cache(forward: Callable[..., Any]) -> bool:
    return "use_cache" in inspect.signature(forward).parameters


def run_as_captured(model: nn.Module) -> Callable[..., Any]:
    """Return the forward of `model` that runs its captured graphs whole, without a plan.

    Only stages gather the parameters of `fully_shard`, so a sharded model's own forward is returned.
    """
    if groups_of(model):
        return model.forward
    forward = CapturedForward(model, granularity=1)
    return lambda *args, **kwargs: forward.call(args, kwargs, CapturedGraph.run_unplanned)
