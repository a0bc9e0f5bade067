"""Capture a model's forward with TorchDynamo, and run it: a function that the caller gives runs each graph."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
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
from rotor_profiling.isolate import set_meanwhile
from rotor_profiling.storage import layout_of
from rotor_profiling.torch_compat import TorchRuntimeError, Unsupported, dispatch_mode_stack, function_mode_stack
from rotor_py.capture.captured_graph import CapturedGraph
from rotor_py.capture.fsdp_markers import FSDPMarks
from rotor_py.capture.graph.stage_graph import run_graph
from rotor_py.capture.patches import NOW, Answers, Asking, OtherAnswerError, functions_replaced
from rotor_py.capture.tracing import MOST_GRAPHS, Tracing, keep_image_sizes, known_image_sizes
from rotor_py.distributed.sharding import groups_of
from rotor_py.errors import UnsupportedModelError
from rotor_py.stage.first_run import hooks_on_all_modules
from rotor_py.stage.forward_state import autocast_now
from rotor_py.stage.saved_tensors import hooks_aside

# Models of the same structure share one compiled forward and its traced graphs: to trace a large model takes seconds.

Handler = Callable[["TracedGraph", tuple[Any, ...]], Sequence[Any]]

# Largest size of the LRU cache `_compiled`. A guess: a larger one takes more memory, a smaller one causes more tracing.
_MAX_COMPILED = 32
# An option of `torch.compile` in newer releases. After a graph break, TorchDynamo also compiles library functions that
# all models call. Without the option, the versions for other models count against this model's recompile limit.
_ISOLATE = "isolate_recompiles"
_extra: dict[str, Any] = {_ISOLATE: True} if _ISOLATE in inspect.signature(torch.compile).parameters else {}
_compiled: OrderedDict[Hashable, _Compiled] = OrderedDict()


@dataclass(slots=True)
class _Compiled:
    run: Callable[..., Any]
    traced: int = 0  # number of times that TorchDynamo has traced this forward
    breaks: list[str] = field(default_factory=list)  # source line of each graph break, as "path:number (text)"
    # `Tracing` in which TorchDynamo gave up a function (a hook in a loop), which it then runs untraced for all models.
    given_up: weakref.ref[Tracing] | None = None


@dataclass(slots=True)
class _Call:
    """One call of a compiled forward. Several models may share the forward, and several threads may call it at once."""

    run: Handler
    tracing: Tracing
    inputs: Any
    recaptured: Callable[[], None] | None  # called when TorchDynamo begins to trace the first new graph
    compiled: _Compiled | None = None

    def begin_tracing(self) -> None:
        """Call `recaptured`, unless this has been done. TorchDynamo's start callback calls this, or else `_backend`."""
        report, self.recaptured = self.recaptured, None
        if report is not None:
            report()


_call: ContextVar[_Call | None] = ContextVar("rotor_py.call", default=None)


class TracedGraph:
    """A graph traced by TorchDynamo. Several models may share it, so the current `_Call` decides how it runs."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.image_sizes = known_image_sizes(graph_module.graph)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        call = _call.get()
        # Without a `_Call`, a function that the user compiled runs this graph: if torch lacks `isolate_recompiles`, a
        # function at its recompile limit runs any compiled version whose guards pass, also that of another backend.
        return run_graph(self.graph_module, arguments) if call is None else call.run(self, arguments)


def _compiled_forward(model: nn.Module, marks: Hashable, answers: Answers, open_sizes: bool) -> _Compiled:
    """Return the compiled forward shared by models structured like `model`. `marks`: the signature of its FSDPMarks."""
    key = _structure(model), marks, answers, open_sizes
    # Compile anew if the forward has reached the recompile limit, or if TorchDynamo gave up tracing a function of it.
    if key not in _compiled or _compiled[key].traced >= MOST_GRAPHS or _compiled[key].given_up:
        # Do what `torch.compile` does, but with access to the context object, whose callback is wrapped below.
        backend = torch_compat.TorchCompileWrapper(_backend, None, None, open_sizes)
        context: Any = torch_compat.optimize(backend=backend, nopython=marks is not None, dynamic=open_sizes, **_extra)
        if hasattr(context, "callback"):  # absent if TorchDynamo is disabled, as by TORCHDYNAMO_DISABLE=1
            context.callback = _with_tracing_settings(context.callback)
        # Copy the code object, since TorchDynamo counts recompilations by code object.
        _compiled[key] = _Compiled(context(FunctionType(_forward.__code__.replace(), _forward.__globals__, "forward")))
    _compiled.move_to_end(key)
    if len(_compiled) > _MAX_COMPILED:
        _compiled.popitem(last=False)
    return _compiled[key]


def _forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], asking: Asking) -> Any:
    NOW.asking = asking  # inside the traced code, so that `patches.holds` sees it while TorchDynamo traces
    return model.forward(*args, **kwargs)


def _backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> TracedGraph:
    if (call := _call.get()) is not None:
        call.begin_tracing()
    return TracedGraph(graph_module)


def _with_tracing_settings(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TorchDynamo's `callback`, which traces a frame that no cached graph fits, in the settings of `Tracing`."""

    # `wraps` copies the attributes by which TorchDynamo identifies the backend. Do not look them up in a `__getattr__`:
    # TorchDynamo would send the frame of this function, like every new frame, to this callback.
    @functools.wraps(callback)
    def trace(*args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        if call is None or call.compiled is None:
            return callback(*args, **kwargs)
        if prediction() is None:
            _refuse_modes()
        call.compiled.traced += 1
        # While hooks are set, entering `torch.func.grad`, as TorchDynamo does to trace it, forbids hooks for good.
        configured = call.tracing.configured(call.begin_tracing, call.compiled.breaks.append)
        with warnings.catch_warnings(), hooks_aside(), configured:
            # TorchDynamo reads `.grad` of all inputs. PyTorch warns of this if an earlier graph or layer made an input.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            keep_image_sizes(tensors_in(call.inputs))
            found = callback(*args, **kwargs)
        if getattr(found, "guarded_code", found) is None and not torch_compat.dynamo_skips(args[0].f_code):
            call.compiled.given_up = weakref.ref(call.tracing)
        return found

    return trace


def _refuse_modes() -> None:
    """Raise UnsupportedModelError if the caller has entered a mode that TorchDynamo traces wrongly, or not at all."""
    # TorchDynamo traces under modes that set one of these flags; which one it reads depends on the release.
    flags = ("is_infra_mode", "ignore_compile_internals")
    modes = [mode for mode in dispatch_mode_stack() if not any(getattr(mode, flag, bool)() for flag in flags)]
    # TorchDynamo traces torch's own function modes, such as a default device. Others do not see calls in traced code.
    modes += [mode for mode in function_mode_stack() if not type(mode).__module__.startswith("torch.")]
    if modes:
        names = " and ".join(type(mode).__name__.lstrip("_") for mode in modes)
        raise UnsupportedModelError(
            f"leave {names} before a training step, or call the plain model in it (the attribute `model`): TorchDynamo "
            "has to capture the model anew for this step, and does not capture what such a mode does",
            kind="capture_suspended",
            name=names,
        )


def _structure(model: nn.Module) -> Hashable:
    """Return a key that is equal for models that can share one compiled forward."""
    modules = tuple((name, type(module), module.training) for name, module in model.named_modules())
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    # `remove_duplicate=False` lists tied weights under all names: a model that ties weights gets a key of its own.
    kinds = tuple((name, t.shape, t.dtype, t.device, t.requires_grad, layout_of(t)) for name, t in tensors)
    return modules, kinds, autocast_now([torch.device("cuda")]), hooks_on_all_modules()


RunGraph = Callable[[CapturedGraph, tuple[Any, ...]], Sequence[Any]]


class CapturedForward:
    """Capture and run the forward of one model. `gathered`: the caller gathers parameters, so no marks are needed."""

    def __init__(self, model: nn.Module, granularity: int, *, open_sizes: bool = True, gathered: bool = False) -> None:
        self.model = model
        self._gathered = gathered
        self.open_sizes = open_sizes
        self._granularity = granularity
        self._marks: FSDPMarks | None = None
        # Maps the assumed answers (Note in `patches.py`) to a compiled forward. None before `_read_model`.
        self._forwards: dict[Answers, _Compiled] | None = None
        # Maps each traced graph, which equal layers share, to a list with the CapturedGraph of each of these layers.
        self._graphs: dict[TracedGraph, list[CapturedGraph]] = {}
        self.tracing = Tracing(model)
        self._answers: Answers = ()  # answers that were right for the last batch, assumed for the next one

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_marks": None, "_forwards": None, "_graphs": {}}

    @property
    def breaks_at(self) -> str | None:
        """Source line of the first graph break, as "path:number (text)". None without breaks."""
        return next((line for each in (self._forwards or {}).values() for line in each.breaks), None)

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_graph: RunGraph,
        recaptured: Callable[[], None] | None = None,
        put_back: Callable[[], None] | None = None,
    ) -> Any:
        """Run the model's forward; `run_graph` runs each graph. Calls `recaptured` if TorchDynamo captures another
        graph, and `put_back`, which restores the model's state, before it repeats the forward with other answers.
        Raises UnsupportedModelError for a sharded model with graph breaks; the model's own errors pass through.
        """
        if self._forwards is None:  # `measuring` was not entered: the plan was loaded from a file, or this is a copy
            self._read_model()
        answers = self._answers
        while True:
            asking = Asking(answers)
            try:
                output = self._call(args, kwargs, run_graph, recaptured, asking)
            except OtherAnswerError as other:  # raised by a check in the context, before any stage has run
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
            # The forward calls this inside `marked`; the graph needs the model's own parameters and hooks.
            with marks.unmarked() if marks else nullcontext():
                outputs = run_graph(graph, arguments)
            if self.open_sizes:
                for at, dimensions in traced.image_sizes:
                    torch_compat.mark_static(outputs[at], dimensions)
            return outputs

        made = self._forwards.get(asking.answers)
        known = made is not None and (made.given_up is None or made.given_up() is self.tracing)
        inputs = (args, kwargs) if self.open_sizes else ()
        call = _Call(run, self.tracing, inputs, recaptured if known and self._graphs else None)
        token = _call.set(call)
        try:
            # Replace functions in every step: TorchDynamo's guards compare them, and any step may trace anew.
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
                "remove the code that breaks the graph, use DistributedDataParallel, or write the model as an "
                f"nn.Sequential of its blocks: fully_shard was applied to {type(self.model).__name__}, and TorchDynamo "
                f"does not capture its forward as one graph: {cause}",
                kind="graph_break",
            ) from error
        except TorchRuntimeError:
            if marks is None:  # a sharded model cannot run uncaptured: its holes have no memory
                self._raise_own_error(args, kwargs)
            raise
        finally:
            NOW.asking = None
            _call.reset(token)

    def _raise_own_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the forward uncaptured, so that the model's own error is raised: TorchDynamo's has hundreds of lines."""
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        with isolated(self.model, device), torch.no_grad():
            try:
                self.model.forward(*args, **kwargs)
            except Exception as error:
                raise error from None  # without TorchDynamo's traceback

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Read anew how the model is sharded. Inside this context, marks do not call FSDP's hooks."""
        self._read_model()
        marks = self._marks
        if marks is None:
            yield
            return
        self._graphs.clear()  # stages of graphs captured before would call the old FSDPMarks
        with set_meanwhile((marks, {"measuring": True})):
            yield

    def _read_model(self) -> None:
        groups = [] if self._gathered else groups_of(self.model)
        self._marks = FSDPMarks(self.model, groups) if groups else None
        self._forwards = {}

    def _captured(self, traced: TracedGraph, arguments: tuple[Any, ...], taken: list[CapturedGraph]) -> CapturedGraph:
        """Return the CapturedGraph with the parameters in `arguments`, or else one not yet `taken` in this forward."""
        known = self._graphs.setdefault(traced, [])
        found = next((each for each in known if each.has(arguments)), None)
        found = found or next((each for each in known if each not in taken), None)
        if found is None:
            buffers = frozenset(id(buffer) for buffer in self.model.buffers())  # `==` of tensors is elementwise
            found = CapturedGraph(traced.graph_module, buffers, self._granularity, self._marks)
            known.append(found)
        taken.append(found)
        return found

    @cached_property
    def _takes_use_cache(self) -> bool:
        return "use_cache" in inspect.signature(self.model.forward).parameters

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs` with `use_cache=False` if the model might fill a key-value cache, which takes memory."""
        # Even if `model.config.use_cache` is False: T5's decoder reads a copy of this configuration, made before.
        cached = hasattr(getattr(self.model, "config", None), "use_cache") and "use_cache" not in kwargs
        return {**kwargs, "use_cache": False} if cached and self._takes_use_cache else kwargs


def run_as_captured(model: nn.Module) -> Callable[..., Any]:
    """Return a function that captures the forward of `model`, and runs it unplanned. Captures no sharded model."""
    if groups_of(model):
        return model.forward
    forward = CapturedForward(model, granularity=1)
    return lambda *args, **kwargs: forward.call(args, kwargs, CapturedGraph.run_unplanned)
