"""Configure TorchDynamo's tracing: symbols for the sizes of inputs, so that one graph serves many shapes.

Note [Sizes of inputs]

Tracing takes seconds. By default, TorchDynamo traces a model for one shape, and again for each size that turns out to
vary. Here every size is a symbol from the start. Four cases still need a graph of their own, which a log line reports:

  1. A size of 1, which broadcasts. TorchDynamo takes every symbol to be two at least, and has no graph for both.
  2. A size that the model's own code asks about (`if length > 64`, a loop over blocks of the input): the graph is for
     sizes with the same answers.
  3. A size of an image: of floating-point tensors with four dimensions or more, only the first dimension is left open.
     Windows, padding and pooling make expressions of symbols that take minutes to simplify: those of a small Swin with
     symbols for height and width were not done after 15 minutes.
  4. Any size, for a model that cannot be traced with symbols.

Parameters and buffers keep their sizes, and numbers in modules are constants. TorchDynamo's default is the same except
in modules of `fully_shard`: there a head's width would be a symbol, and a Llama took nine seconds a layer to trace. But
a number that has changed between two traces stays open from then on, such as a count of calls, or a temperature that a
training loop lowers. Otherwise every step would be traced.
"""

from __future__ import annotations

import logging
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


@contextmanager
def settings_of(config: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Set `settings` of a torch config meanwhile. `config.patch` takes longer, and leaks context variables."""
    before = [(name, getattr(config, name)) for name in settings]
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before:
            setattr(config, name, value)


# Numbers in modules that TorchDynamo leaves open: those that changed since the last trace. It takes such a number for a
# constant, and would trace a model that counts its calls in every step.


class OpenNumbers:
    """Names of the number attributes of one model's modules that are left open."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Values at the last trace, by module and name.
        self._seen: dict[tuple[str, str], int | float] = {}
        self.names: set[str] = set()

    def look(self) -> None:
        """Find the numbers that changed since the last trace; called before each trace."""
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
        """Have TorchDynamo take symbols for these numbers, and for no others in modules."""
        usual: Any = builder.VariableBuilder.wrap_symfloat

        def wrap(variables: Any, value: float) -> Any:
            if self._is_open(variables.source):
                return usual(variables, value)
            variables.install_guards(GuardBuilder.CONSTANT_MATCH)
            return ConstantVariable.create(value=value, source=variables.source)

        def is_number(value: Any, source: Any) -> bool:
            if self._is_open(source):
                return False
            place = source.guard_source
            # Integers of `fully_shard` modules are constants, too.
            return bool(constant(value, source) or (place() if callable(place) else place).is_fsdp_module())

        # TorchDynamo's function that decides that an integer is a constant, where it has one.
        name = "is_int_specialization_case"
        constant: Any = getattr(builder, name, None)
        floats: dict[str, Any] = {"specialize_float": False} if self.names else {}
        with (
            settings_of(builder, {name: is_number} if constant is not None else {}),
            settings_of(torch_compat.dynamo_config, floats),
            settings_of(builder.VariableBuilder, {"wrap_symfloat": wrap} if self.names else {}),
        ):
            yield

    def _is_open(self, source: Any) -> bool:
        return getattr(source, "member", None) in self.names


MOST_GRAPHS = 64
"""Most graphs of one model. TorchDynamo's own limit is 8, after which it runs the model uncaptured, without a plan. A
guess: a model may ask about the length of its input, and a data set has dozens of lengths.
"""
# Dimensions of a batch of images: number, channels, height and width.
_IMAGE = 4
_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
_LIMIT = next(name for name in ("recompile_limit", "cache_size_limit") if hasattr(torch_compat.dynamo_config, name))
_DYNAMO = {
    # Inside DistributedDataParallel, Dynamo would cut the graph at each full gradient bucket, so that compiled
    # backwards overlap with communication. Stages have their own backwards, and overlap anyway.
    "optimize_ddp": False,
    # By default, Dynamo breaks the graph at recurrent layers, whose operators compile badly. Here they run uncompiled.
    "allow_rnn": True,
    # With symbols for sizes, every other number of the input would get one, too. A size can be left open; a temperature
    # is part of the computation.
    "specialize_float": True,
    # By default, TorchDynamo misses hooks that are registered or removed after it has traced a module.
    "skip_nnmodule_hook_guards": False,
}
# One symbol for two sizes that happen to be equal would tie them: a batch of 8 sequences of length 8 could have no
# other length.
_SHAPES = {"use_duck_shape": False}


def keep_image_sizes(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if _is_image(tensor):
            _keep_sizes(tensor, range(1, tensor.dim()))


def keep_known_sizes(outputs: Sequence[Any], graph: fx.Graph) -> None:
    """After a graph break, keep those image sizes in a graph's outputs that were numbers in that graph."""
    (nodes,) = next(iter(reversed(graph.nodes))).args
    for node, tensor in zip(nodes, outputs, strict=True):
        if isinstance(tensor, torch.Tensor) and _is_image(tensor):
            sizes = tensors_of(node)[0].shape
            _keep_sizes(tensor, [dimension for dimension, size in enumerate(sizes) if isinstance(size, int)])


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= _IMAGE and tensor.is_floating_point()  # a mask of that many dimensions has another type


def _keep_sizes(tensor: torch.Tensor, dimensions: Iterable[int]) -> None:
    for dimension in dimensions:
        torch_compat.mark_static(tensor, dimension)


class Tracing:
    """Watch the tracing during one call, in this thread; call `began` once, when tracing begins."""

    def __init__(self, began: Callable[[], None], numbers: OpenNumbers) -> None:
        self._began: Callable[[], None] | None = began
        self._numbers = numbers
        self._breaks_before = len(graph_break_reasons)
        self._thread = get_ident()

    @contextmanager
    def as_the_note_says(self) -> Iterator[None]:
        """Have TorchDynamo trace as the Note says: not in every step, since changing settings takes long."""
        dynamo = {**_DYNAMO, _LIMIT: MOST_GRAPHS}
        self._numbers.look()
        with (
            settings_of(torch_compat.dynamo_config, dynamo),
            settings_of(shape_config, _SHAPES),
            self._numbers.left_open(),
            _shapes_unlogged(),
        ):
            callbacks.register_start_callback(self._start)
            try:
                yield
            finally:
                callbacks.remove_start_callback(self._start)

    def begin(self) -> None:
        """Call `began` once: by TorchDynamo's callbacks, or, while another thread compiles, by the new graph."""
        began, self._began = self._began, None
        if began is not None:
            began()

    @property
    def breaks_at(self) -> str | None:
        """The line of the model's first graph break: path:number, and its text. None without breaks."""
        for reason in graph_break_reasons[self._breaks_before :]:
            if reason.user_stack:
                frame = reason.user_stack[-1]
                return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
        return None

    def _start(self, *_: Any) -> None:
        if get_ident() == self._thread:
            self.begin()


@contextmanager
def _shapes_unlogged() -> Iterator[None]:
    """Silence torch's log of twenty internal lines on a shape error; the error itself says as much."""
    thread = get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR or record.thread != thread

    _fake_tensors.addFilter(elsewhere)
    try:
        yield
    finally:
        _fake_tensors.removeFilter(elsewhere)
