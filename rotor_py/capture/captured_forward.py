"""Run a model's forward under TorchDynamo, which calls our backend with every graph that it captures."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn

from rotor_profiling import isolated, tensors_in, torch_compat
from rotor_profiling.backends import prediction
from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import TorchRuntimeError, Unsupported, dispatch_mode_stack
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.fsdp_markers import FSDPMarks
from rotor_py.capture.graph.stage_graph import run_graph
from rotor_py.capture.patches import NOW, Answers, Asking, OtherAnswerError, functions_replaced
from rotor_py.capture.tracing import MOST_GRAPHS, Tracing, keep_image_sizes, known_image_sizes
from rotor_py.distributed.sharding import groups_of
from rotor_py.errors import UnsupportedModelError
from rotor_py.stage.first_run import hooks_on_all_modules
from rotor_py.stage.forward_state import autocast_now

# Models built alike share one compiled forward and its traced graphs: tracing a large model takes seconds.

Handler = Callable[["TracedGraph", tuple[Any, ...]], Sequence[Any]]

# Compiled forwards kept, by last use. A guess: more cost memory for their traced graphs, fewer cost tracing again.
_MOST = 32
# Option of newer `torch.compile`. After a graph break, TorchDynamo resumes in library functions, and caches by code
# object: unless isolated, versions of other models count against the limit, and their guards fail with a KeyError.
_ALONE = "isolate_recompiles"
_alone: dict[str, Any] = {_ALONE: True} if _ALONE in inspect.signature(torch.compile).parameters else {}
_compiled: OrderedDict[Hashable, _Compiled] = OrderedDict()


@dataclass(slots=True)
class _Compiled:
    run: Callable[..., Any]
    traced: int = 0  # how often TorchDynamo was asked for a graph
    # Lines of the graph breaks: path:number, and its text. Kept here, since models built alike are traced once.
    breaks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Call:
    """A call of a compiled forward: models built alike share one, and may train in several threads at once."""

    run: Handler
    tracing: Tracing
    inputs: Any
    recaptured: Callable[[], None] | None  # told of the first graph that is traced
    compiled: _Compiled | None = None

    def begin_tracing(self) -> None:
        """By TorchDynamo's callbacks, or, while another thread compiles, by the new graph."""
        tell, self.recaptured = self.recaptured, None
        if tell is not None:
            tell()


_call: ContextVar[_Call | None] = ContextVar("rotor_py.call", default=None)


class TracedGraph:
    """A graph traced by Dynamo. Models built alike may share it, so the current call says how it runs."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.image_sizes = known_image_sizes(graph_module.graph)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        call = _call.get()
        # A user's own torch.compile may come here where torch cannot isolate captures: TorchDynamo caches by code
        # object, and a function at its limit of versions runs one that fits, whichever backend made it.
        return run_graph(self.graph_module, arguments) if call is None else call.run(self, arguments)


def _compiled_forward(model: nn.Module, marks: Hashable, answers: Answers, open_sizes: bool) -> _Compiled:
    """A compiled forward that models built alike share; `marks` are from `fully_shard`."""
    key = _structure(model), marks, answers, open_sizes
    # `model` is an argument, so a function keeps no model alive. One at TorchDynamo's limit makes no more graphs.
    if key not in _compiled or _compiled[key].traced >= MOST_GRAPHS:
        # Does what `torch.compile` does, which does not expose its context with the callback.
        backend = torch_compat.TorchCompileWrapper(_backend, None, None, open_sizes)
        context: Any = torch_compat.optimize(backend=backend, nopython=marks is not None, dynamic=open_sizes, **_alone)
        if hasattr(context, "callback"):  # absent where TorchDynamo is switched off
            context.callback = _tracing_as_noted(context.callback)
        # With a code object of its own: Dynamo limits recompilations by code object.
        _compiled[key] = _Compiled(context(FunctionType(_forward.__code__.replace(), _forward.__globals__, "forward")))
    _compiled.move_to_end(key)
    if len(_compiled) > _MOST:
        _compiled.popitem(last=False)
    return _compiled[key]


def _forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asking: Asking) -> Any:
    NOW.asking = asking  # set inside the traced code
    return model.forward(*args, **kwargs)


def _backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> TracedGraph:
    if (call := _call.get()) is not None:
        call.begin_tracing()
    return TracedGraph(graph_module)


def _tracing_as_noted(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TorchDynamo's `callback`, called where no graph fits, with the settings of `Tracing`."""

    # Copy the attributes by which TorchDynamo knows the backend. Python code must not look them up: TorchDynamo reads
    # them while every frame still goes to the callback.
    @functools.wraps(callback)
    def trace(*args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        if call is None or call.compiled is None:
            return callback(*args, **kwargs)
        if prediction() is None:
            _refuse_modes()
        call.compiled.traced += 1
        with call.tracing.as_the_note_says(call.begin_tracing, call.compiled.breaks.append):
            keep_image_sizes(tensors_in(call.inputs))
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
            f"leave {names} out of training steps, or use it around the attribute `model`: TorchDynamo would have to "
            "capture the model anew for this step, and captures nothing inside of it",
            kind="capture_suspended",
            name=names,
        )


def _structure(model: nn.Module) -> Hashable:
    """A key equal for models that may share code: Dynamo's guards separate others, but versions are limited."""
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    # `remove_duplicate=False`: a model with two tied weights differs from one where they are not tied.
    kinds = tuple((name, t.shape, t.dtype, t.device, t.requires_grad, layout_of(t)) for name, t in tensors)
    return modules, kinds, autocast_now([torch.device("cuda")]), hooks_on_all_modules()


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
        self._forwards: dict[Answers, _Compiled] | None = None
        # Per traced graph, one entry for each layer that runs it: layers built alike may share a traced graph.
        self._graphs: dict[TracedGraph, list[CapturedGraph]] = {}
        self.tracing = Tracing(model)
        self._answers: Answers = ()  # the last batch's answers, assumed for the next

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_marks": None, "_forwards": None, "_graphs": {}}

    @property
    def breaks_at(self) -> str | None:
        """Line of the first graph break: path:number, and its text. None without breaks."""
        return next((line for each in (self._forwards or {}).values() for line in each.breaks), None)

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_graph: RunGraph,
        recaptured: Callable[[], None] | None = None,
        put_back: Callable[[], None] | None = None,
    ) -> Any:
        """Run the model's forward, with `run_graph` in place of every graph; `recaptured` is told of another capture,
        and `put_back` undoes what has run when the forward begins again. Raises UnsupportedModelError for a sharded
        model that cannot be captured whole; the model's own errors pass through.
        """
        if self._forwards is None:  # the first call unless it was measured: the plan came from a file, or it is a copy
            self._look_at_model()
        answers = self._answers
        while True:
            asking = Asking(answers)
            try:
                output = self._call(args, kwargs, run_graph, recaptured, asking)
            except OtherAnswerError as other:  # before any stage has run
                answers = asking.corrected(other)
                if put_back is not None:
                    put_back()
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
        assert self._forwards is not None
        marks = self._marks
        taken: list[CapturedGraph] = []

        def run(traced: TracedGraph, arguments: tuple[Any, ...]) -> Sequence[Any]:
            asking.open = False
            graph = self._captured(traced, arguments, taken)
            # The graph runs inside of the forward, while holes and marks are on the model.
            with marks.unmarked() if marks else nullcontext():
                outputs = run_graph(graph, arguments)
            if self.open_sizes:
                for at, dimensions in traced.image_sizes:
                    torch_compat.mark_static(outputs[at], dimensions)
            return outputs

        known = asking.answers in self._forwards
        inputs = (args, kwargs) if self.open_sizes else ()
        call = _Call(run, self.tracing, inputs, recaptured if known and self._graphs else None)
        token = _call.set(call)
        try:
            # In every step: guards compare these functions, and a forward that has changed is captured in any of them.
            with functions_replaced, marks.marked() if marks else nullcontext():
                if not known:
                    signature = marks.signature if marks else None
                    made = _compiled_forward(self.model, signature, asking.answers, self.open_sizes)
                    self._forwards[asking.answers] = made
                call.compiled = compiled = self._forwards[asking.answers]
                return compiled.run(self.model, args, self._without_cache(kwargs), asking)
        except Unsupported as error:
            if marks is None:
                raise
            cause = str(error).partition("\n")[0].rstrip(".: ")
            raise UnsupportedModelError(
                "remove what breaks the graph, use DistributedDataParallel, or write the model as an nn.Sequential of "
                f"its blocks: fully_shard was applied to {type(self.model).__name__}, and TorchDynamo does not capture "
                f"its forward as one graph: {cause}",
                kind="graph_break",
            ) from error
        except TorchRuntimeError:
            if marks is None:  # with marks, the model cannot run uncaptured: its parameters are holes
                self._raise_own_error(args, kwargs)
            raise
        finally:
            NOW.asking = None
            _call.reset(token)

    def _raise_own_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise the model's own error for this input, if any: TorchDynamo's is hundreds of lines on its tracing."""
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        with isolated(self.model, device), torch.no_grad():
            try:
                self.model.forward(*args, **kwargs)
            except Exception as error:
                raise error from None  # not "during handling of" TorchDynamo's

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

    def _look_at_model(self) -> None:
        groups = [] if self._gathered else groups_of(self.model)
        self._marks = FSDPMarks(self.model, groups) if groups else None
        self._forwards = {}

    def _captured(self, traced: TracedGraph, arguments: tuple[Any, ...], taken: list[CapturedGraph]) -> CapturedGraph:
        """The traced graph bound to this model's parameters, and to none that this forward took with other ones."""
        known = self._graphs.setdefault(traced, [])
        found = next((each for each in known if each.has(arguments)), None)
        found = found or next((each for each in known if each not in taken), None)
        if found is None:
            # By id: tensors compare element by element.
            buffers = frozenset(id(buffer) for buffer in self.model.buffers())
            found = CapturedGraph(traced.graph_module, buffers, self._granularity, self._marks)
            known.append(found)
        taken.append(found)
        return found

    @cached_property
    def _takes_use_cache(self) -> bool:
        return "use_cache" in inspect.signature(self.model.forward).parameters

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add `use_cache=False`, as transformers does under checkpointing: nothing reads the cache."""
        cached = getattr(getattr(self.model, "config", None), "use_cache", False) and "use_cache" not in kwargs
        return {**kwargs, "use_cache": False} if cached and self._takes_use_cache else kwargs


def run_as_captured(model: nn.Module) -> Callable[..., Any]:
    """The forward of `model` that runs its captured graphs whole; of a sharded model, its own: only stages gather."""
    if groups_of(model):
        return model.forward
    forward = CapturedForward(model, granularity=1)
    return lambda *args, **kwargs: forward.call(args, kwargs, CapturedGraph.run_unplanned)
