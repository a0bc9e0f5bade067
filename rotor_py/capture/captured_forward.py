"""Run a model's forward under TorchDynamo, which calls our backend with every graph that it captures."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
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
from rotor_py.capture.patches import functions_replaced
from rotor_py.capture.tracing import OpenNumbers, Tracing, keep_image_sizes, keep_known_sizes
from rotor_py.distributed.sharding import groups_of
from rotor_py.errors import UnsupportedModelError, record_fields
from rotor_py.stage.forward_state import autocast_now

# Models built alike share one compiled forward and its traced graphs: tracing a large model takes seconds, and tests,
# sweeps over limits and copies of a model would each pay for it.

Handler = Callable[["TracedGraph", tuple[Any, ...]], Sequence[Any]]

# Compiled forwards kept, by last use. A guess: each holds traced graphs, so more costs memory, and fewer costs tracing
# again.
_MOST = 32
# Option of `torch.compile` in newer releases. After a graph break, TorchDynamo resumes in library functions that other
# models call as well, and caches by code object. Isolated, a capture does not see their versions. Otherwise these count
# against its limit, and their guards fail with a KeyError on a model that lacks the guarded attributes.
_ALONE = "isolate_recompiles"
_alone: dict[str, Any] = {_ALONE: True} if _ALONE in inspect.signature(torch.compile).parameters else {}
_compiled: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()


class _Receiver(NamedTuple):
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


def compile_forward(
    model: nn.Module, marks: Hashable = None, answers: Answers = (), *, open_sizes: bool = True
) -> Callable[..., Any]:
    """The compiled forward of `model`, shared by models built alike; `marks` are those of `fully_shard`."""
    key = _structure(model), marks, answers, open_sizes
    # `model` is an argument of the function, not a part of it, so a function keeps no model alive.
    if key not in _compiled:
        _compiled[key] = _traced_when_called(fullgraph=marks is not None, dynamic=open_sizes)
    _compiled.move_to_end(key)
    if len(_compiled) > _MOST:
        _compiled.popitem(last=False)
    return _compiled[key]


@contextmanager
def _handing_graphs_to(receiver: _Receiver) -> Iterator[None]:
    # Held in a context variable: models built alike share a function, and may train in several threads at once.
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


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
    """Raise UnsupportedModelError in a mode of the caller under which TorchDynamo traces nothing, now or later."""
    # Those under which TorchDynamo traces, by the flags that this release of torch checks.
    own = ("is_infra_mode", "ignore_compile_internals")
    modes = [mode for mode in dispatch_mode_stack() if not any(getattr(mode, word, bool)() for word in own)]
    if modes:
        names = " and ".join(type(mode).__name__.lstrip("_") for mode in modes)
        raise UnsupportedModelError(
            f"inside of {names}, TorchDynamo captures nothing, and for this step it would have to capture the model "
            "anew; leave that out of training steps, or use it around the model itself, the attribute `model`",
            kind="capture_suspended",
            name=names,
        )


def _traced_when_called(*, fullgraph: bool, dynamic: bool) -> Callable[..., Any]:
    # Does what `torch.compile` does, which does not expose its context with the callback.
    backend = torch_compat.TorchCompileWrapper(_backend, None, None, dynamic)
    context: Any = torch_compat.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **_alone)
    if hasattr(context, "callback"):  # absent where TorchDynamo is switched off
        context.callback = _tracing_as_noted(context.callback)
    function: Callable[..., Any] = context(_own_function())
    return function


def _structure(model: nn.Module) -> Hashable:
    """A key equal for models that may share code: Dynamo's guards separate others, but versions are limited."""
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    # `remove_duplicate=False`: a model with two tied weights differs from one where they are not tied.
    kinds = tuple((name, t.shape, t.dtype, t.device, t.requires_grad, layout_of(t)) for name, t in tensors)
    return modules, kinds, autocast_now([torch.device("cuda")])


def _own_function() -> Callable[..., Any]:
    """A function with a code object of its own: Dynamo limits recompilations by code object."""

    def forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asking: Asking) -> Any:
        NOW.asking = asking  # set inside the traced code
        return model.forward(*args, **kwargs)

    return FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)


_log = logging.getLogger("rotor_py")

RunGraph = Callable[[CapturedGraph, tuple[Any, ...]], Sequence[Any]]


class CapturedForward:
    """The forward of one model. A `gathered` sharded one has whole parameters, so it is captured as any other."""

    def __init__(self, model: nn.Module, granularity: int, *, open_sizes: bool = True, gathered: bool = False) -> None:
        self.model = model
        self._gathered = gathered
        self.open_sizes = open_sizes
        self._granularity = granularity
        self._marks: FSDPMarks | None = None
        # Each made at its first call. None before the model was looked at.
        self._forwards: dict[Answers, Callable[..., Any]] | None = None
        # Per traced graph, one entry for each layer that runs it: layers built alike may share a traced graph.
        self._graphs: dict[TracedGraph, list[CapturedGraph]] = {}
        # Line of the model's first graph break; None without breaks.
        self.breaks_at: str | None = None
        self._told_of_cache = False
        self._numbers = OpenNumbers(model)
        # The last batch's answers, assumed for the next.
        self._answers: Answers = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_marks": None, "_forwards": None, "_graphs": {}}

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_graph: RunGraph,
        recaptured: Callable[[], None] | None = None,
    ) -> Any:
        """Run the model's forward, with `run_graph` in place of every graph; `recaptured` is told of another capture.
        Raises UnsupportedModelError for a sharded model that cannot be captured whole; the model's own errors pass
        through.
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
        recaptured: Callable[[], None] | None,
        asking: Asking,
    ) -> Any:
        # The first call unless it was measured: the plan came from a file, or this is a copy.
        forwards = self._look_at_model() if self._forwards is None else self._forwards
        marks = self._marks

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
                recaptured()

        now = Tracing(began, self._numbers)
        with (
            _handing_graphs_to(_Receiver(handle, now)),
            functions_replaced,
            marks.marked() if marks else nullcontext(),
        ):
            known = asking.answers in forwards
            if not known:
                signature = marks.signature if marks else None
                made = compile_forward(self.model, signature, asking.answers, open_sizes=self.open_sizes)
                forwards[asking.answers] = made
            forward = forwards[asking.answers]
            if self.open_sizes:
                keep_image_sizes(tensors_in((args, kwargs)))
            try:
                return forward(self.model, args, self._without_cache(kwargs), asking)
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
                NOW.asking = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Look at the model anew, since it may have changed, and disable its marks during measurement."""
        self._look_at_model()
        marks = self._marks
        if marks is None:
            yield
            return
        self._graphs.clear()  # their stages call the old marks
        marks.measuring = True
        try:
            yield
        finally:
            marks.measuring = False

    def _look_at_model(self) -> dict[Answers, Callable[..., Any]]:
        self._marks = None if self._gathered else FSDPMarks.of(self.model)
        self._forwards = {}
        return self._forwards

    def _captured(
        self, traced: TracedGraph, arguments: tuple[Any, ...], taken: list[CapturedGraph], marks: FSDPMarks | None
    ) -> CapturedGraph:
        """The traced graph bound to this model's parameters, and to none that this forward took with other ones."""
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

    @cached_property
    def _takes_use_cache(self) -> bool:
        return "use_cache" in inspect.signature(self.model.forward).parameters

    def _refusal(self, error: Unsupported) -> UnsupportedModelError:
        cause = str(error).partition("\n")[0].rstrip(".: ")
        return UnsupportedModelError(
            f"fully_shard was applied to {type(self.model).__name__}, but TorchDynamo does not capture its forward as "
            f"one graph: {cause}. Remove what breaks the graph, use DistributedDataParallel, or write the model as an "
            "nn.Sequential of its blocks",
            kind="graph_break",
        )

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add `use_cache=False`, as transformers does under checkpointing: nothing reads the cache."""
        config = getattr(self.model, "config", None)
        if not getattr(config, "use_cache", False) or "use_cache" in kwargs:
            return kwargs
        if not self._takes_use_cache:
            return kwargs
        if not self._told_of_cache:
            self._told_of_cache = True
            _log.info(
                "use_cache is off while training: nothing reads the cache there, and it takes memory",
                extra=record_fields("cache_off"),
            )
        return {**kwargs, "use_cache": False}


def run_as_captured(model: nn.Module) -> Callable[..., Any]:
    """The forward of `model` that runs its captured graphs whole; of a sharded model, its own: only stages gather."""
    if groups_of(model):
        return model.forward
    forward = CapturedForward(model, granularity=1)
    return lambda *args, **kwargs: forward.call(args, kwargs, CapturedGraph.run_unplanned)
