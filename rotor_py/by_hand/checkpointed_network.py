"""Networks of segments: store only each segment's input, and recompute the rest in the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from rotor_profiling import leaves_of, storage_bytes, tensors_in
from rotor_profiling.isolate import accelerators, trained_parameters
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage.forward_state import present
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable, InvalidValueError
from rotor_solver.described_error import InvalidStateError
from rotor_solver.segments import recompute_segments, segments_from

Segment = Callable[[Any], Any]


class Checkpoint:
    """The input of one segment, from which its output can be recomputed.

    Make it right before the segment runs: it records the current random state, autocast and the segment's buffers.
    `input` is detached, not copied. After a backward through the result of `recompute`, its `grad` is the gradient of
    the segment's input. Raises ValueError if the segment cannot be called.
    """

    def __init__(self, segment: Segment, input: Any) -> None:
        refuse_uncallable(segment, "the segment", name="segment")
        self.segment = segment
        self.input = leaves_of(input)
        self._versions = [tensor._version for tensor in tensors_in(self.input)]
        devices = accelerators(t.device for t in [*tensors_in(input), *trained_parameters(segment)])
        self._surroundings = present(segment, devices)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the segment's input."""
        return storage_bytes(tensors_in(self.input))

    def recompute(self) -> Any:
        """The segment's output as in its first run, with an autograd graph if gradients are enabled.

        Leaves the random state and the buffers as they are. Raises RuntimeError if the input was overwritten after the
        checkpoint was made.
        """
        self._refuse_overwritten()
        with self._surroundings.restored(self.segment, graph=torch.is_grad_enabled()):
            output = self._surroundings.run(self.segment, self.input)
        self._refuse_overwritten()  # by the segment itself
        return output

    def _refuse_overwritten(self) -> None:
        if [tensor._version for tensor in tensors_in(self.input)] != self._versions:
            raise InvalidStateError(
                "the input of the segment was overwritten after the checkpoint was made, so its output cannot be "
                "computed again; use the first layer of the segment without inplace=True, or give a clone",
                kind="kept_overwritten",
            )


class CheckpointedNetwork(nn.Module):
    """Runs segments in order and trains them, storing only the input of each.

    `segments` are modules, or functions without parameters; each takes the previous output. The backward recomputes
    each, last first. Outputs, gradients, buffers and the random stream equal plain training. In eval mode or without
    gradients, nothing is checkpointed. Raises ValueError if there are no segments, or if one cannot be called.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        super().__init__()
        found = list(segments)  # an iterator can be read only once
        if not found:
            raise InvalidValueError(
                "a CheckpointedNetwork needs at least one segment, and got none", kind="no_segments", name="segments"
            )
        for number, segment in enumerate(found):
            refuse_uncallable(segment, f"segment {number}", segment=number)
        self.segments = nn.ModuleList(each if isinstance(each, nn.Module) else _FunctionSegment(each) for each in found)
        self.memory_bytes = 0
        """Bytes of the segments' inputs stored by the last training forward; 0 before the first one."""
        self.full_memory_bytes = 0
        """Bytes of the network's input and the outputs of all modules in the segments, if all were stored."""

    def forward(self, x: Any) -> Any:
        """Return the last segment's output for `x`, a tensor or a nested structure of tensors.

        The backward raises RuntimeError if a function among the segments uses a parameter.
        """
        trains = any(t.requires_grad for t in [*self.parameters(), *tensors_in(x)])
        if not self.training or not torch.is_grad_enabled() or not trains:
            for segment in self.segments:
                x = segment(x)
            return x
        runners = [StageRunner(segment, f"segment {number}", open=True) for number, segment in enumerate(self.segments)]
        count = len(runners)
        enables = map(ForwardEnable, range(count))
        instructions = read_sequence(count, recompute_segments(enables, segments_from(range(count), count)))
        kept, made = _StorageSizes(), _StorageSizes()
        with ExitStack() as hooks:
            for segment in set(self.segments):
                hooks.enter_context(segment.register_forward_pre_hook(lambda _, inputs: kept.add(inputs)))
            for module in set(self.segments.modules()) - {self.segments}:
                hooks.enter_context(module.register_forward_hook(lambda _, inputs, output: made.add(output)))
            output = Tape(runners, instructions).forward(x)
        made |= kept
        self.memory_bytes, self.full_memory_bytes = kept.nbytes, made.nbytes
        return output

    @property
    def memory_savings(self) -> float:
        """Share of `full_memory_bytes` that is not stored: in [0, 1)."""
        return 1 - self.memory_bytes / self.full_memory_bytes if self.full_memory_bytes else 0.0


def refuse_uncallable(given: object, called: str, name: str | None = None, **numbers: int) -> None:
    if not callable(given):
        message = f"{called} is {given!r}; it has to be a module or a function"
        raise InvalidValueError(message, kind="not_a_segment", stage=None, name=name, **numbers)


class _StorageSizes(dict[int, tuple[object, int]]):
    """Bytes of storages, each once, by its only weak reference: freed ones count, and addresses are reused."""

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
