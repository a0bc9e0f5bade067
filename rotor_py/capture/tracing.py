"""Set TorchDynamo's configuration so that it traces models with symbolic input sizes: one graph serves many shapes.

Note [Sizes of inputs]

By default, TorchDynamo traces a model for the shapes of its first inputs, and again when a size has changed; each
trace takes seconds. rotor_py makes sizes symbolic from the first trace on. TorchDynamo still traces another graph for:

  1. An input with a size of 1, which broadcasts. TorchDynamo assumes that symbolic sizes are at least 2.
  2. A size that the model's own code tests (`if length > 64`, a loop over blocks of the input): a graph serves only the
     sizes for which these tests have the same results as when it was traced.
  3. Images of another height or width: in floating-point tensors with four dimensions or more, only the first size is
     symbolic. When all sizes were, TorchDynamo took over 15 minutes to simplify those of padded images in a small Swin.
  4. Each input shape, if TorchDynamo cannot trace the model with symbolic sizes.

Sizes of parameters and buffers are constants, and so are modules' attributes that are ints or floats: with a symbolic
head dimension, tracing took nine seconds per layer of a Llama. But if an attribute's value has changed between two
traces (a count of calls, a temperature), it becomes symbolic: as a constant, it would make every step trace again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config as shape_config
from torch import fx, nn

from rotor_profiling import torch_compat
from rotor_profiling.isolate import set_meanwhile
from rotor_profiling.torch_compat import ConstantVariable, GuardBuilder, graph_break_reasons
from rotor_profiling.torch_compat import dynamo_builder as builder
from rotor_profiling.torch_compat import dynamo_callbacks as callbacks
from rotor_py.capture.graph.graph_nodes import tensors_of

Settings = list[tuple[Any, Mapping[str, Any]]]  # pairs: a module or class of torch, and its attributes' new values


# Largest number of graphs that are captured of a model; then it runs uncaptured. A guess: data has dozens of shapes.
MOST_GRAPHS = 64
_IMAGE = 4  # least number of dimensions of a batch of images: batch size, channels, height and width
_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
_LIMIT = next(name for name in ("recompile_limit", "cache_size_limit") if hasattr(torch_compat.dynamo_config, name))
_DYNAMO = {
    # By default, TorchDynamo splits graphs at DistributedDataParallel's buckets, so that gradients are sent early.
    "optimize_ddp": False,
    # By default, TorchDynamo breaks the graph at recurrent layers.
    "allow_rnn": True,
    # By default, traced code draws from PyTorch's generator where the model draws from NumPy's.
    "use_numpy_random_stream": True,
    # With symbolic sizes, floats in the input, such as a temperature, become symbolic by default.
    "specialize_float": True,
    # By default, TorchDynamo does not trace a module again after hooks have been registered on it or removed.
    "skip_nnmodule_hook_guards": False,
}
# By default, each run of a graph draws from a `random.Random` what the trace drew. Have such an object break the graph.
_NO_STREAMS = {"RandomVariable": SimpleNamespace(is_supported_random_obj=lambda _: False)}
# By default, sizes that are equal at tracing get one symbol: traced for an 8 x 8 batch, a graph serves no 8 x 9 batch.
_SHAPES = {"use_duck_shape": False}


def keep_image_sizes(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in filter(_is_image, tensors):
        torch_compat.mark_static(tensor, list(range(1, tensor.dim())))


def known_image_sizes(graph: fx.Graph) -> list[tuple[int, list[int]]]:
    """Return a pair for each image among a graph's outputs: its index, and the dimensions whose sizes are constants."""
    returned: Any = graph.output_node().args[0]
    outputs = [tensors_of(node) if isinstance(node, fx.Node) else [] for node in returned]
    return [
        (at, [dimension for dimension, size in enumerate(tensors[0].shape) if isinstance(size, int)])
        for at, tensors in enumerate(outputs)
        if tensors and _is_image(tensors[0])
    ]


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= _IMAGE and tensor.is_floating_point()  # boolean attention masks have four dimensions, too


class Tracing:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Maps pairs of a module's path and an attribute's name to the attribute's int or float at the last trace.
        self._seen: dict[tuple[str, str], int | float] = {}
        self._open: set[str] = set()  # names of attributes that TorchDynamo makes symbolic: their values have changed

    @contextmanager
    def configured(self, began: Callable[[], None], broke: Callable[[str], None]) -> Iterator[None]:
        """Set TorchDynamo's configuration as the Note says. Enter this only while TorchDynamo traces: to enter is slow.
        When TorchDynamo starts to compile, it calls `began`, unless another thread is compiling, too. On exit, `broke`
        is called for every graph break that has a source line, with this line as "path:number (text)".
        """
        thread, breaks_before = get_ident(), len(graph_break_reasons)

        def start(*_: Any) -> None:
            if get_ident() == thread:
                began()

        now = {
            (path, name): value
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, float)
        }
        self._open |= {key[1] for key, value in now.items() if self._seen.get(key, value) != value}
        self._seen = now
        dynamo = {**_DYNAMO, _LIMIT: MOST_GRAPHS, **({"specialize_float": False} if self._open else {})}
        fixed: Settings = [(torch_compat.dynamo_config, dynamo), (shape_config, _SHAPES), (builder, _NO_STREAMS)]
        # Do not use torch's `config.patch`, which is slower and leaks context variables.
        with set_meanwhile(*fixed, *self._numbers_open()), _shapes_unlogged():
            callbacks.register_start_callback(start)
            try:
                yield
            finally:
                callbacks.remove_start_callback(start)
                for reason in graph_break_reasons[breaks_before:]:
                    if reason.user_stack:
                        frame = reason.user_stack[-1]
                        broke(f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})")

    def _numbers_open(self) -> Settings:
        """Return settings with which TorchDynamo makes an int or float attribute symbolic if its name is in `_open`."""
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
            # By default, TorchDynamo makes ints in modules that `fully_shard` shards symbolic: make them constants.
            return bool(constant(value, source) or (place() if callable(place) else place).is_fsdp_module())

        # Newer releases of TorchDynamo call a function of this name to decide whether an int is a constant.
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
    """Suppress the twenty lines that torch logs in this thread for a shape error, whose own message says the same."""
    thread = get_ident()

    def is_logged(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR or record.thread != thread

    _fake_tensors.addFilter(is_logged)
    try:
        yield
    finally:
        _fake_tensors.removeFilter(is_logged)
