"""Running a model's forward under TorchDynamo, which calls our function with every graph that it captures."""

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

# Forwards handed to torch.compile, one for all models that are built alike, so that they share what is traced.
#
# Tracing takes seconds for a large model. Tests, sweeps over limits and copies of a model would pay for it every time.

Handler = Callable[["TracedGraph", tuple[Any, ...]], Sequence[Any]]

_MOST = 32
"""The most functions that are kept: those used last. A guess. There is a bound because each holds traced graphs."""
_ALONE = "isolate_recompiles"
"""An option of torch.compile, in newer releases. Where a graph breaks, TorchDynamo goes on in functions of the library
that models of other kinds call as well, and it caches by code object. Alone, a capture finds nothing there of others:
else their versions would count against its limit, and why they do not fit would be asked of a model that lacks what
they guard: a KeyError."""
_alone: dict[str, Any] = {_ALONE: True} if _ALONE in inspect.signature(torch.compile).parameters else {}
_compiled: OrderedDict[Hashable, CompiledForward] = OrderedDict()


class _Receiver(NamedTuple):
    """What runs graphs that are called, and how those are traced that are new."""

    run: Handler
    tracing: Tracing


_receiver: ContextVar[_Receiver | None] = ContextVar("receiver", default=None)


class TracedGraph:
    """A graph that Dynamo traced. Several models may share it, so the one that is called says how it is run."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        receiver = _receiver.get()
        # A user's own torch.compile may come here, if torch is too old for captures that are alone: TorchDynamo caches
        # what it traced by code object, and once a function has as many versions as it may have, it runs one that fits,
        # whichever backend made it.
        return run_graph(self.graph_module, arguments) if receiver is None else receiver.run(self, arguments)


@dataclass(slots=True)
class CompiledForward:
    """A function (model, args, kwargs, asking) that TorchDynamo traces when it is called."""

    function: Callable[..., Any]
    seconds: float = 0.0
    """What tracing took the last time."""


def compile_forward(
    model: nn.Module, marks: Hashable = None, answers: Answers = (), *, open_sizes: bool = True
) -> CompiledForward:
    """What runs the forward of `model`, and of models that are built alike.

    With `open_sizes`, graphs have symbols for the sizes of inputs; without, each is for one shape. There is a function
    for each `answers` of `asking`: TorchDynamo would count another one as a recompilation. `marks` says where modules
    of `fully_shard` begin and end. A model with marks is captured as one graph or not at all: between two graphs its
    own code would run, on holes instead of parameters. Where the graph would break, a call of the function raises
    torch's `Unsupported`.
    """
    key = _structure(model), marks, answers, open_sizes
    # `model` is an argument of the function and no part of it, so a function keeps no model alive.
    if key not in _compiled:
        _compiled[key] = CompiledForward(_traced_when_called(fullgraph=marks is not None, dynamic=open_sizes))
    _compiled.move_to_end(key)
    if len(_compiled) > _MOST:
        _compiled.popitem(last=False)
    return _compiled[key]


class HandingGraphsTo:
    """A context: graphs that are called inside it are run by `handler`; those that are new are a part of `tracing`.

    Both are a context variable: models built alike share a function, and may train in several threads at once.
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
    """TorchDynamo's own `callback`, which it calls where no graph fits, with its settings as `Tracing` has them."""

    # With the callback's attributes, by which TorchDynamo knows the backend. They must not be looked up by code in
    # Python: it looks while every frame still goes to the callback.
    @functools.wraps(callback)
    def trace(*args: Any, **kwargs: Any) -> Any:
        receiver = _receiver.get()
        if receiver is not None and prediction() is None:
            _refuse_modes()
        with nullcontext() if receiver is None else receiver.tracing.as_the_note_says():
            return callback(*args, **kwargs)

    return trace


def _refuse_modes() -> None:
    """UnsupportedModelError in a mode of the caller's under which TorchDynamo traces nothing.

    It would run the function as it is, and not look at it again, in this step and all that follow.
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
    """Whether TorchDynamo traces under a mode: what the mode says of itself, as far as this release of torch asks."""
    return any(getattr(mode, word, bool)() for word in ("is_infra_mode", "ignore_compile_internals"))


def _traced_when_called(*, fullgraph: bool, dynamic: bool) -> Callable[..., Any]:
    """`_own_function` under TorchDynamo, whose settings are those of the Note in `tracing.py` while it traces."""
    # What `torch.compile` does. That does not let its context be seen, which has the callback.
    backend = torch_compat.TorchCompileWrapper(_backend, None, None, dynamic)
    context: Any = torch_compat.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **_alone)
    if hasattr(context, "callback"):  # not where TorchDynamo is switched off
        context.callback = _tracing_as_noted(context.callback)
    function: Callable[..., Any] = context(_own_function())
    return function


def _structure(model: nn.Module) -> Hashable:
    """Equal for models that may share code.

    Dynamo's guards would keep unlike models apart, too. But a function may have only so many versions before Dynamo
    runs it uncompiled.
    """
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    # `remove_duplicate=False`: models differ if one of them ties two weights and the other does not.
    kinds = tuple((name, t.shape, t.dtype, t.device, t.requires_grad, layout_of(t)) for name, t in tensors)
    return modules, kinds, tuple(map(Autocast.now, ("cpu", "cuda")))


def _own_function() -> Callable[..., Any]:
    """A function with a code object of its own.

    Dynamo counts recompilations by code object, and gives up on one that many models share.
    """

    def forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asking: Asking) -> Any:
        NOW.asking = asking  # here, where TorchDynamo traces it
        return model.forward(*args, **kwargs)

    return FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)


# Running a model's forward under TorchDynamo, which calls our function with every graph that it captures.

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
            "nn.Sequential of its blocks",
            kind="graph_break",
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
            _log.info(
                "use_cache is off while training: nothing reads the cache there, and it takes memory",
                extra=record_fields("cache_off"),
            )
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
