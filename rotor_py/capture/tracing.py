"""How TorchDynamo is told to trace a model: with symbols for the sizes of inputs, so that one graph serves many shapes.

# Note [Sizes of inputs]
#
# Tracing takes seconds. By itself, TorchDynamo traces a model for one shape, again when a size differs, and again when
# another one does. Here it takes a symbol for every size from the start. These still need a graph of their own, and a
# line in the log says so when one is made:
#
#  1. A size of 1, which broadcasts. TorchDynamo takes every symbol to be two at least, and knows no graph for both.
#  2. A size that the model's own code asks about (`if length > 64`, a loop over blocks of the input): the graph is for
#     sizes with the same answers.
#  3. A size of an image: of floating-point tensors with four dimensions or more, only the first dimension is left open.
#     Windows, padding and pooling make expressions of symbols that take minutes to simplify: those of a small Swin with
#     symbols for height and width were not done after 15 minutes.
#  4. Any size, for a model that cannot be traced with symbols.
#
# Parameters and buffers keep their sizes, and numbers that modules hold are numbers. TorchDynamo takes no symbols for
# those, either, but for the modules of `fully_shard`: there the width of a head would be one, and a Llama took nine
# seconds a layer to trace. But a number that has changed from one trace to the next is left open from then on: a count
# of calls, a temperature that a training loop lowers. Else every step would be traced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config as shape_config
from torch import fx, nn

from rotor_profiling import torch_compat
from rotor_profiling.torch_compat import ConstantVariable, GuardBuilder, graph_break_reasons
from rotor_profiling.torch_compat import dynamo_builder as builder
from rotor_profiling.torch_compat import dynamo_callbacks as callbacks
from rotor_py.capture.graph.graph_nodes import tensors_of

# Settings of torch, changed for a while.


@contextmanager
def settings_of(config: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Have settings of torch in this thread as they are here, as long as this context lasts.

    `config.patch` makes a class and a context variable at every call. That takes longer than a small layer does, and
    the variables stay in memory for good: Python keeps them in the context that they were set in.
    """
    before = [(name, getattr(config, name)) for name in settings]
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before:
            setattr(config, name, value)


# Numbers that modules hold, and that TorchDynamo is to leave open: those that have changed since it traced last.
#
# It takes a number of a module for a constant, and traces anew when it is another one. A model that counts its calls
# would be traced in every step.

_NUMBER = "is_int_specialization_case"
"""The function by which TorchDynamo decides that an integer is a number, where it has one."""


class OpenNumbers:
    """The numbers in attributes of one model's modules, by name, that are left open."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[tuple[str, str], int | float] = {}
        """By module and name, when TorchDynamo traced last."""
        self.names: set[str] = set()

    def look(self) -> None:
        """TorchDynamo is about to trace: see which numbers are not what they were the last time."""
        now = {
            (path, name): value
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, float)
        }
        self.names |= {key[1] for key, value in now.items() if self._seen.get(key, value) != value}
        self._seen = now

    @contextmanager
    def left_open(self) -> Iterator[None]:
        """Have TorchDynamo take symbols for these numbers, and for no others that modules hold."""
        usual: Any = builder.VariableBuilder.wrap_symfloat

        def wrap(variables: Any, value: float) -> Any:
            if self._is_open(variables.source):
                return usual(variables, value)
            variables.install_guards(GuardBuilder.CONSTANT_MATCH)
            return ConstantVariable.create(value=value, source=variables.source)

        floats: dict[str, Any] = {"specialize_float": False} if self.names else {}
        with (
            settings_of(builder, self._of_integers()),
            settings_of(torch_compat.dynamo_config, floats),
            settings_of(builder.VariableBuilder, {"wrap_symfloat": wrap} if self.names else {}),
        ):
            yield

    def _of_integers(self) -> dict[str, Callable[..., bool]]:
        """What `builder` is given: integers of the modules of `fully_shard` are numbers, too, if they are not open."""
        usual = getattr(builder, _NUMBER, None)
        if usual is None:
            return {}

        def is_number(value: Any, source: Any) -> bool:
            if self._is_open(source):
                return False
            place = source.guard_source
            return bool(usual(value, source) or (place() if callable(place) else place).is_fsdp_module())

        return {_NUMBER: is_number}

    def _is_open(self, source: Any) -> bool:
        return getattr(source, "member", None) in self.names


MOST_GRAPHS = 64
"""Graphs of one model. TorchDynamo's own limit is 8, after which it runs the model as it is, without a plan. A guess:
a model may ask about the length of its input, and a data set has dozens of lengths."""
_IMAGE = 4
"""Dimensions of a batch of images: its number, channels, height and width."""
_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
_LIMIT = next(name for name in ("recompile_limit", "cache_size_limit") if hasattr(torch_compat.dynamo_config, name))
_DYNAMO = {
    # Inside DistributedDataParallel, Dynamo would cut the graph where a bucket of gradients is full, so that compiled
    # backwards overlap with communication. Stages have backwards of their own, and overlap anyway.
    "optimize_ddp": False,
    # By default, Dynamo breaks the graph at recurrent layers, since compilers do badly on their operators. Here these
    # run as they are.
    "allow_rnn": True,
    # With symbols for sizes, every other number of the input would get one, too. A size can be left open; a temperature
    # is a part of what the graph computes.
    "specialize_float": True,
    # By default, TorchDynamo does not see that a hook was registered on a module, or removed, after it has traced it.
    "skip_nnmodule_hook_guards": False,
}
# One symbol for two sizes that happen to be equal would tie them together: a batch of 8 sequences of length 8 could
# have no other length.
_SHAPES = {"use_duck_shape": False}


def keep_image_sizes(tensors: Iterable[torch.Tensor]) -> None:
    """Of tensors that are images, have TorchDynamo leave open how many they are, and nothing else."""
    for tensor in tensors:
        if _is_image(tensor):
            _keep_sizes(tensor, range(1, tensor.dim()))


def keep_known_sizes(outputs: Sequence[Any], graph: fx.Graph) -> None:
    """Where a model's graph breaks, what comes out of one graph goes into the next. Keep the sizes of images that have
    been numbers in the first."""
    (nodes,) = next(iter(reversed(graph.nodes))).args
    for node, tensor in zip(nodes, outputs, strict=True):
        if isinstance(tensor, torch.Tensor) and _is_image(tensor):
            sizes = tensors_of(node)[0].shape
            _keep_sizes(tensor, [dimension for dimension, size in enumerate(sizes) if isinstance(size, int)])


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= _IMAGE and tensor.is_floating_point()  # a mask of that many dimensions is of another type


def _keep_sizes(tensor: torch.Tensor, dimensions: Iterable[int]) -> None:
    for dimension in dimensions:
        torch_compat.mark_static(tensor, dimension)


class Tracing:
    """The tracing in the course of one call, in this thread: `began` is called once, when it begins."""

    def __init__(self, began: Callable[[], None], numbers: OpenNumbers) -> None:
        self.seconds = 0.0
        """What it took so far. Of a model whose graph breaks, the pieces are traced one by one."""
        self._began: Callable[[], None] | None = began
        self._numbers = numbers
        self._breaks_before = len(graph_break_reasons)
        self._thread = get_ident()
        self._since: float | None = None

    @contextmanager
    def as_the_note_says(self) -> Iterator[None]:
        """Have TorchDynamo trace as the Note says, as long as this context lasts.

        It is entered where a graph is to be made, and not around every step: settings take longer than small layers do.
        """
        dynamo = {**_DYNAMO, _LIMIT: MOST_GRAPHS}
        self._numbers.look()
        with (
            settings_of(torch_compat.dynamo_config, dynamo),
            settings_of(shape_config, _SHAPES),
            self._numbers.left_open(),
            _shapes_unlogged(),
        ):
            callbacks.register_start_callback(self._start)
            callbacks.register_end_callback(self._end)
            try:
                yield
            finally:
                callbacks.remove_start_callback(self._start)
                callbacks.remove_end_callback(self._end)

    def begin(self) -> None:
        """Say that tracing has begun, if that has not been said.

        TorchDynamo says so by callbacks, but not while it compiles in another thread. Then the new graph shows it.
        """
        began, self._began = self._began, None
        if began is not None:
            began()

    @property
    def breaks_at(self) -> str | None:
        """The line of the model at which the graph broke first: path:number, and its text. None if it did not break."""
        for reason in graph_break_reasons[self._breaks_before :]:
            if reason.user_stack:
                frame = reason.user_stack[-1]
                return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
        return None

    def _start(self, *_: Any) -> None:
        if get_ident() == self._thread:
            self.begin()
            self._since = time.perf_counter()

    def _end(self, *_: Any) -> None:
        if get_ident() == self._thread and self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None


@contextmanager
def _shapes_unlogged() -> Iterator[None]:
    """Where shapes do not fit, the error says so, and torch would log twenty lines of its own insides before it."""
    thread = get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR or record.thread != thread

    _fake_tensors.addFilter(elsewhere)
    try:
        yield
    finally:
        _fake_tensors.removeFilter(elsewhere)
