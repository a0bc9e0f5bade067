"""Configure TorchDynamo's tracing: symbols for the sizes of inputs, so that one graph serves many shapes.

Note [Sizes of inputs]

By default, TorchDynamo traces a model for one shape, and again for each size that turns out to vary, for seconds each.
Here every size is a symbol from the start. Four cases still need a graph of their own, which a log line reports:

  1. A size of 1, which broadcasts. TorchDynamo takes every symbol to be two at least, and has no graph for both.
  2. A size that the model's own code asks about (`if length > 64`, a loop over blocks of the input): the graph is for
     sizes with the same answers.
  3. A size of an image: of floating-point tensors with four dimensions or more, only the first dimension is left open.
     Windows, padding and pooling make expressions that are slow to simplify: over 15 minutes for a small Swin.
  4. Any size, for a model that cannot be traced with symbols.

Parameters and buffers keep their sizes, and numbers in modules are constants, in modules of `fully_shard` as well: with
a symbol for a head's width, a Llama took nine seconds a layer to trace. But a number that has changed between two
traces, such as a count of calls or a lowered temperature, stays open: otherwise every step would be traced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
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

Settings = list[tuple[Any, Mapping[str, Any]]]  # modules and classes of torch, each with values for attributes of it


@contextmanager
def _set_meanwhile(settings: Settings) -> Iterator[None]:
    # `config.patch` takes longer, and leaks context variables.
    before = [(owner, name, getattr(owner, name)) for owner, values in settings for name in values]
    try:
        for owner, values in settings:
            for name, value in values.items():
                setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


# Most graphs of one model, for TorchDynamo's 8; beyond, it runs uncaptured. A guess: a data set has dozens of lengths.
MOST_GRAPHS = 64
_IMAGE = 4  # dimensions of a batch of images: number, channels, height and width
_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
_LIMIT = next(name for name in ("recompile_limit", "cache_size_limit") if hasattr(torch_compat.dynamo_config, name))
_DYNAMO = {
    # Inside DistributedDataParallel, Dynamo would cut the graph at each full gradient bucket. Stages overlap anyway.
    "optimize_ddp": False,
    # By default, Dynamo breaks the graph at recurrent layers, whose operators compile badly. Here they run uncompiled.
    "allow_rnn": True,
    # By default, traced code draws with PyTorch where the model draws with NumPy.
    "use_numpy_random_stream": True,
    # With symbols for sizes, every other number of the input, such as a temperature, would get one, too.
    "specialize_float": True,
    # By default, TorchDynamo misses hooks that are registered or removed after it has traced a module.
    "skip_nnmodule_hook_guards": False,
}
# One symbol for two equal sizes would tie them: a batch of 8 sequences of length 8 could have no other length.
_SHAPES = {"use_duck_shape": False}


def keep_image_sizes(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in filter(_is_image, tensors):
        torch_compat.mark_static(tensor, list(range(1, tensor.dim())))


def known_image_sizes(graph: fx.Graph) -> list[tuple[int, list[int]]]:
    """The images among a graph's outputs, and their dimensions whose size is a number: kept after a graph break."""
    returned: Any = graph.output_node().args[0]
    outputs = [tensors_of(node) if isinstance(node, fx.Node) else [] for node in returned]
    return [
        (at, [dimension for dimension, size in enumerate(tensors[0].shape) if isinstance(size, int)])
        for at, tensors in enumerate(outputs)
        if tensors and _is_image(tensors[0])
    ]


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= _IMAGE and tensor.is_floating_point()  # a mask of that many dimensions has another type


class Tracing:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Values of the numbers in its modules at the last trace, by module and name.
        self._seen: dict[tuple[str, str], int | float] = {}
        self._open: set[str] = set()  # names of those left open: they changed between two traces

    @contextmanager
    def as_the_note_says(self, began: Callable[[], None], broke: Callable[[str], None]) -> Iterator[None]:
        """Have TorchDynamo trace as the Note says: not in every step, since changing settings takes long. `began` is
        called where TorchDynamo's callbacks are: not while another thread compiles. `broke` is called with the line of
        every graph break: path:number, and its text.
        """
        thread, breaks_before = get_ident(), len(graph_break_reasons)

        def start(*_: Any) -> None:
            if get_ident() == thread:
                began()

        self._find_changed_numbers()
        dynamo = {**_DYNAMO, _LIMIT: MOST_GRAPHS, **({"specialize_float": False} if self._open else {})}
        settings: Settings = [(torch_compat.dynamo_config, dynamo), (shape_config, _SHAPES), *self._numbers_open()]
        with _set_meanwhile(settings), _shapes_unlogged():
            callbacks.register_start_callback(start)
            try:
                yield
            finally:
                callbacks.remove_start_callback(start)
                for reason in graph_break_reasons[breaks_before:]:
                    if reason.user_stack:
                        frame = reason.user_stack[-1]
                        broke(f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})")

    def _find_changed_numbers(self) -> None:
        now = {
            (path, name): value
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, float)
        }
        self._open |= {key[1] for key, value in now.items() if self._seen.get(key, value) != value}
        self._seen = now

    def _numbers_open(self) -> Settings:
        """Settings by which TorchDynamo takes symbols for the open numbers, and for no others in modules."""
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
        return [
            (builder, {name: is_number} if constant is not None else {}),
            (builder.VariableBuilder, {"wrap_symfloat": wrap} if self._open else {}),
        ]

    def _is_open(self, source: Any) -> bool:
        return getattr(source, "member", None) in self._open


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
