"""Store every n-th layer's output, or each segment's input, and recompute all other activations in the backward.

The forward records the random state, autocast and buffers with which each layer or segment runs. A recomputation
restores these, so its results are bitwise equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotor_profiling import leaves_of, storage_bytes, storages, tensors_in
from rotor_profiling.isolate import accelerators_of
from rotor_profiling.value_tree import tree_map_only
from rotor_py.by_hand.strategy import whole_number
from rotor_py.errors import CheckpointLimitError, InvalidStateError, InvalidValueError, MissingCheckpointError
from rotor_py.execute.backward_passes import ActivationStore
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage.forward_state import Surroundings, present, recorded
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable
from rotor_solver.segments import recompute_segments, segments_from

_INPUT = -1  # index under which the network's input is stored: layer outputs have the indices 0, 1, …
Forward = Callable[[Any, Any], Any]  # callable of a layer and its input that returns the layer's output
Segment = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Settings of an `ActivationCheckpointer`: it stores every n-th output for n = `checkpoint_every_n_layers`.

    The outputs are those of layers 0, n, 2n, …, at most `max_checkpoints`; none for n = 0. With `use_mixed_precision`,
    floating-point outputs are stored in `storage_dtype`, bfloat16 or float16, and read in their own dtype.

    Raises ValueError if a number is negative or not an integer, if `use_mixed_precision` is not a bool, or if
    `storage_dtype` is neither bfloat16 nor float16.
    """

    checkpoint_every_n_layers: int = 4
    max_checkpoints: int = 64
    use_mixed_precision: bool = False
    storage_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        whole_number(self.checkpoint_every_n_layers, "checkpoint_every_n_layers")
        whole_number(self.max_checkpoints, "max_checkpoints")
        if not isinstance(self.use_mixed_precision, bool):
            message = f"use_mixed_precision is {self.use_mixed_precision!r}; it has to be True or False"
            raise InvalidValueError(message, kind="not_a_bool", name="use_mixed_precision")
        if self.storage_dtype not in (torch.bfloat16, torch.float16):
            message = f"storage_dtype is {self.storage_dtype!r}; it has to be torch.bfloat16 or torch.float16"
            raise InvalidValueError(message, kind="unknown_value", name="storage_dtype")


class ActivationCheckpointer:
    """Stores the outputs of layers 0, n, 2n, … as checkpoints, and recomputes the other outputs from them.

    Outputs are tensors, or tuples, lists and dicts of tensors. Train with `checkpointed_forward`, or call `save` in a
    loop of your own. Checkpoints stay in memory until you call `clear` or `checkpointed_forward` again.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = CheckpointConfig() if config is None else config
        self._stored_layers: set[int] = set()  # indices of the layers whose output is stored when they run
        self.clear()

    def is_checkpoint_layer(self, layer_idx: int) -> bool:
        """Whether this layer's output is a checkpoint. Raises ValueError for a negative or non-integer index."""
        n = self.config.checkpoint_every_n_layers
        return whole_number(layer_idx, "layer_idx") % n == 0 if n else False

    def save(self, layer_idx: int, activation: Any) -> None:
        """Store `activation`, a layer's output, if `is_checkpoint_layer`; else count its bytes as `memory_saved_bytes`.

        Raises CheckpointLimitError (a ValueError) if `max_checkpoints` other outputs are stored, and ValueError if the
        index is negative or not an integer.
        """
        stored = self.is_checkpoint_layer(layer_idx)
        if stored and layer_idx not in self._store and len(self._store) >= self.config.max_checkpoints:
            raise CheckpointLimitError(layer_idx, self.config.max_checkpoints)
        self._seen[layer_idx] = storage_bytes(tensors_in(activation))
        if stored:
            self._store.keep(layer_idx, activation)

    def get(self, layer_idx: int) -> Any:
        """Return the stored output of a layer, detached and in its own dtype; None if it is not stored.

        Without mixed precision, outputs are stored without a copy: raises RuntimeError if an operator has overwritten
        this one in place since. Raises ValueError if the index is negative or not an integer.
        """
        whole_number(layer_idx, "layer_idx")
        if layer_idx not in self._store:
            return None
        self._store.refuse_overwritten(layer_idx)
        # Return a new object each time, so that the caller's `requires_grad_` does not affect the stored tensor.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, self._store[layer_idx])

    def clear(self) -> None:
        """Release all stored outputs, the network's input, and the states recorded for recomputations."""
        self._half = self.config.storage_dtype if self.config.use_mixed_precision else None
        self._store = _KeptOutputs(self._half)
        self._input = _KeptOutputs()  # the network's input: the caller's tensors, so rounding would save no memory
        self._seen: dict[int, int] = {}  # bytes of the output of each layer that was run or saved
        self._surroundings: dict[int, Surroundings] = {}

    @property
    def num_checkpoints(self) -> int:
        """Number of stored layer outputs."""
        return len(self._store)

    @property
    def memory_stored_bytes(self) -> int:
        """Bytes of the stored outputs, without the network's input, which the caller has in memory anyway."""
        return self._store.nbytes

    @property
    def memory_saved_bytes(self) -> int:
        """Bytes of the outputs of all layers that ran, minus those of the stored outputs; at least 0."""
        # A stored view counts with its whole storage, which may be larger than all outputs together.
        return max(0, sum(self._seen.values()) - self.memory_stored_bytes)

    def checkpointed_forward(
        self, input: Any, layers: Sequence[Any], forward_fn: Forward = lambda layer, value: layer(value)
    ) -> Any:
        """Run `layers` in order from `input`, store checkpoints, and return the last layer's output.

        Stores only the first `max_checkpoints` checkpoints. With gradients enabled, the backward recomputes the layers
        between checkpoints. Gradients equal those of plain training bit for bit, unless `use_mixed_precision` rounds
        the outputs from which they are computed. The backward raises RuntimeError if `forward_fn`, or a layer that is
        not an `nn.Module`, uses parameters of its own, which would get no gradient.
        """
        self.clear()
        kept = [index for index in range(len(layers)) if self.is_checkpoint_layer(index)][: self.config.max_checkpoints]
        self._stored_layers = set(kept)
        self._input.keep(_INPUT, input)
        recording = _Recording(self)
        run = [_Layer(layer, forward_fn, recording, index) for index, layer in enumerate(layers)]
        owned = [p for layer in run for p in layer.parameters()]
        value = input
        if run and torch.is_grad_enabled() and any(t.requires_grad for t in [*owned, *tensors_in(input)]):
            starts = [0, *(index + 1 for index in kept if index + 1 < len(run))]
            # `Tape` stores the input of every segment but the last, which runs with a graph, since its backward is
            # first. The output of a layer is the input of the segment that starts after the layer.
            shared = [start - 1 for start in starts[1:-1]]
            self._stored_layers -= {*shared}
            store = ActivationStore(self._half)
            value = _recomputing(run, "layer", segments_from(starts, len(run))[:-1], input, store)
            for index in shared:
                self._store.adopt(index, store, index + 1)
        else:
            for each in run:
                value = each(value)
        recording.by = None  # recomputations in the backward must not be recorded
        return value

    def recompute_from_checkpoint(
        self, target_layer: int, layers: Sequence[Any], forward_fn: Forward = lambda layer, value: layer(value)
    ) -> Any:
        """Return the stored output of `target_layer`, or recompute it from the last checkpoint before it or the input.

        The result equals the forward's output bit for bit, unless the checkpoint is in half precision. Raises
        ValueError if there is no such layer, MissingCheckpointError (a ValueError) if neither a checkpoint before the
        layer nor the input is stored, and RuntimeError if the checkpoint or input to use was overwritten in place.
        """
        if whole_number(target_layer, "target_layer") >= len(layers):
            message = f"target_layer is {target_layer}; there are {len(layers)} layers, the first is 0"
            raise InvalidValueError(message, kind="no_such_layer", name="target_layer", got=target_layer)
        start = max((kept for kept in self._store if kept <= target_layer), default=_INPUT)
        if start == _INPUT:
            if _INPUT not in self._input:
                raise MissingCheckpointError(target_layer)
            self._input.refuse_overwritten(_INPUT)
        value = self._input[_INPUT] if start == _INPUT else self.get(start)
        for index in range(start + 1, target_layer + 1):
            found = self._surroundings.get(index)  # None if the caller ran the layer and called `save`
            with found.restored(layers[index], graph=torch.is_grad_enabled()) if found else nullcontext():
                value = found.run(forward_fn, layers[index], value) if found else forward_fn(layers[index], value)
        return value


def _recomputing(
    modules: Sequence[nn.Module], called: str, again: list[range], value: Any, store: ActivationStore | None = None
) -> Any:
    """Return the output of `modules` for `value`. The backward recomputes the segments `again`, with inputs in `store`.

    Errors name a module by `called` and its number.
    """
    runners = [StageRunner(module, f"{called} {number}", open=True) for number, module in enumerate(modules)]
    sequence = recompute_segments(map(ForwardEnable, range(len(runners))), again)
    return Tape(runners, read_sequence(len(runners), sequence), store).forward(value)


@dataclass
class _Recording:
    """`by` is the checkpointer that records layer runs; None in the backward, which restores attributes of `_Layer`."""

    by: ActivationCheckpointer | None


class _Layer(nn.Module):
    """Calls a layer by `forward_fn`, as a stage, and records the run unless it is a recomputation."""

    def __init__(self, layer: Any, forward_fn: Forward, recording: _Recording, index: int) -> None:
        super().__init__()
        self.layer = layer
        self.forward_fn = forward_fn
        self.recording = recording
        self.index = index

    def forward(self, value: Any) -> Any:
        by = self.recording.by
        if by is None:
            return self.forward_fn(self.layer, value)
        devices = accelerators_of(value, self)
        with recorded(self.layer, devices, True, f"layer {self.index}", [], value) as found:
            output = self.forward_fn(self.layer, value)
        by._surroundings[self.index] = found[0]
        # An output that shares its storage with the input takes no new memory.
        old = storages(tensors_in(value))
        by._seen[self.index] = sum(size for at, size in storages(tensors_in(output)).items() if at not in old)
        if self.index in by._stored_layers:
            by._store.keep(self.index, output)
        return output


class _KeptOutputs(ActivationStore):
    """Stored layer outputs, with the version counters of their tensors, which show later in-place operators."""

    def __init__(self, storage_dtype: torch.dtype | None = None) -> None:
        super().__init__(storage_dtype)
        self._versions: dict[int, list[int]] = {}

    def keep(self, index: int, value: Any) -> None:
        super().keep(index, value)
        self._versions[index] = self._versions_now(index)

    def adopt(self, index: int, other: ActivationStore, there: int) -> None:
        super().adopt(index, other, there)
        self._versions[index] = self._versions_now(index)

    def refuse_overwritten(self, index: int) -> None:
        if self._versions_now(index) != self._versions[index]:
            what = "the network's input" if index == _INPUT else f"the stored output of layer {index}"
            message = (
                f"use layer {index + 1} without inplace=True, or pass it a clone: {what} was overwritten after the run"
            )
            raise InvalidStateError(message, kind="kept_overwritten", layer=index)

    def _versions_now(self, index: int) -> list[int]:
        return [tensor._version for tensor in self.held_tensors(index)]


# Networks of segments store only the input of each segment, and recompute all else in the backward.


class Checkpoint:
    """The input of one segment, from which its output can be recomputed.

    Construct it right before the segment runs: it records the random state, autocast and the segment's buffers. The
    attribute `input` is detached, not copied. After a backward through the result of `recompute`, `input.grad` is the
    gradient of the segment's input. Raises ValueError if `segment` is not callable.
    """

    def __init__(self, segment: Segment, input: Any) -> None:
        refuse_uncallable(segment, "the segment", name="segment")
        self.segment = segment
        self.input = leaves_of(input)
        self._versions = [tensor._version for tensor in tensors_in(self.input)]
        devices = accelerators_of(input, segment)
        self._surroundings = present(segment, devices)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the segment's input."""
        return storage_bytes(tensors_in(self.input))

    def recompute(self) -> Any:
        """Run the segment again as it first ran, and return its output, with a graph if gradients are enabled.

        Afterwards, random state and buffers are as before the call. Raises RuntimeError if the input was overwritten in
        place after the checkpoint was made.
        """
        self._refuse_overwritten()
        with self._surroundings.restored(self.segment, graph=torch.is_grad_enabled()):
            output = self._surroundings.run(self.segment, self.input)
        self._refuse_overwritten()  # the segment itself may have overwritten its input
        return output

    def _refuse_overwritten(self) -> None:
        if [tensor._version for tensor in tensors_in(self.input)] != self._versions:
            message = (
                "use the segment's first layer without inplace=True, or pass it a clone: the input of the segment was "
                "overwritten after the checkpoint was made, so its output cannot be recomputed"
            )
            raise InvalidStateError(message, kind="kept_overwritten")


class CheckpointedNetwork(nn.Module):
    """Runs segments in order, stores only each segment's input, and recomputes the segments in the backward.

    `segments` are modules, or functions without parameters; each gets the output of the one before. Outputs, gradients,
    buffers and random numbers equal those of plain training. In eval mode or under `no_grad`, nothing is stored or
    recomputed. Raises ValueError if there are no segments, or if a segment is not callable.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        super().__init__()
        found = list(segments)  # read an iterator only once
        if not found:
            raise InvalidValueError(
                "a CheckpointedNetwork needs at least one segment, and got none", kind="no_segments", name="segments"
            )
        for number, segment in enumerate(found):
            refuse_uncallable(segment, f"segment {number}", segment=number)
        self.segments = nn.ModuleList(each if isinstance(each, nn.Module) else _FunctionSegment(each) for each in found)
        self.memory_bytes = 0
        """Bytes of the segments' inputs that the last training forward stored; 0 before the first training forward."""
        self.full_memory_bytes = 0
        """Bytes of the network's input and of the outputs of all modules in the segments, as if all were stored."""

    def forward(self, x: Any) -> Any:
        """Return the last segment's output for `x`, a tensor or a nested structure of tensors.

        The backward raises RuntimeError if a function among the segments uses a parameter.
        """
        trains = any(t.requires_grad for t in [*self.parameters(), *tensors_in(x)])
        if not self.training or not torch.is_grad_enabled() or not trains:
            for segment in self.segments:
                x = segment(x)
            return x
        count = len(self.segments)
        kept, made = _StorageSizes(), _StorageSizes()
        with ExitStack() as hooks:
            for segment in set(self.segments):
                hooks.enter_context(segment.register_forward_pre_hook(lambda _, inputs: kept.add(inputs)))
            for module in set(self.segments.modules()) - {self.segments}:
                hooks.enter_context(module.register_forward_hook(lambda _, inputs, output: made.add(output)))
            output = _recomputing([*self.segments], "segment", segments_from(range(count), count), x)
        made |= kept
        self.memory_bytes, self.full_memory_bytes = kept.nbytes, made.nbytes
        return output

    @property
    def memory_savings(self) -> float:
        """Share of `full_memory_bytes` that the last training forward did not store: 0.75 means that a quarter was."""
        return 1 - self.memory_bytes / self.full_memory_bytes if self.full_memory_bytes else 0.0


def refuse_uncallable(given: object, called: str, name: str | None = None, **numbers: int) -> None:
    if not callable(given):
        message = f"{called} is {given!r}; it has to be a module or a function"
        raise InvalidValueError(message, kind="not_a_segment", stage=None, name=name, **numbers)


class _StorageSizes(dict[int, tuple[object, int]]):
    """Maps storages, even freed ones, to their bytes. Keys are ids of weak references, since addresses are reused."""

    def add(self, value: Any) -> None:
        for tensor in tensors_in(value):
            reference = weakref.ref(tensor.untyped_storage())
            self[id(reference)] = reference, storage_bytes([tensor])

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.values())


class _FunctionSegment(nn.Module):
    def __init__(self, function: Segment) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)
