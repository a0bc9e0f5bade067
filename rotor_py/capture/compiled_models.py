"""Forwards handed to torch.compile, one for all models that are built alike, so that they share what is traced.

Tracing takes seconds for a large model. Tests, sweeps over limits and copies of a model would pay for it every time.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import fx, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rotor_profiling.instruments import prediction
from rotor_profiling.storage import layout_of
from rotor_py.capture.data_questions import NOW, Answers, Asking
from rotor_py.capture.graph.run_graph import run_graph
from rotor_py.capture.tracing.tracing import Tracing
from rotor_py.errors import UnsupportedModelError
from rotor_py.stage.restored.autocast import Autocast

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
    modes = [mode for mode in _get_current_dispatch_mode_stack() if not _is_torchs_own(mode)]
    if modes:
        names = " and ".join(type(mode).__name__.lstrip("_") for mode in modes)
        raise UnsupportedModelError(
            f"inside of {names}, TorchDynamo captures nothing, and for this step it would have to capture the model "
            "anew; leave that out of training steps, or use it around the model itself, the attribute `model`"
        )


def _is_torchs_own(mode: Any) -> bool:
    """Whether TorchDynamo traces under a mode: what the mode says of itself, as far as this release of torch asks."""
    return any(getattr(mode, word, bool)() for word in ("is_infra_mode", "ignore_compile_internals"))


def _traced_when_called(*, fullgraph: bool, dynamic: bool) -> Callable[..., Any]:
    """`_own_function` under TorchDynamo, whose settings are those of the Note in `tracing.py` while it traces."""
    # What `torch.compile` does. That does not let its context be seen, which has the callback.
    backend = torch._TorchCompileWrapper(_backend, None, None, dynamic)
    context: Any = torch._dynamo.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **_alone)
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
