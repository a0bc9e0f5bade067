"""The bytes of one stage in one way: what it holds, and what it needs while it runs, from the phases of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from rotor_profiling.memory import MemoryMeter, Phase
from rotor_profiling.stage.gradients import leaves_of, scalar_after
from rotor_profiling.stage.stage_context import Runner, StageContext
from rotor_profiling.storage import allocated, storages, tensors_in
from rotor_profiling.torch_compat import tree_map_only

# What a run with a graph does not hold of its input and output.
#
# Of most inputs, it can be seen when nobody holds them any more (`WatchedInput`). Others cannot be watched, tensors of
# subclasses and those without memory: of these, a copy is let go of.


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SHARED = frozenset((*_FLOATS, *_INTEGERS))
"""What every release of torch hands to itself by DLPack."""


class WatchedInput:
    """`value` with twins of its tensors: others over the same memory, whose storages are their own.

    A tensor itself has other holders while its stage is measured, so what a graph holds of it does not show. A copy
    would take as much memory again. Tensors whose storages are `owned` are no part of the input, and have no twins.
    """

    def __init__(self, value: Any, owned: frozenset[int]) -> None:
        self.nbytes = 0
        """of all twins, as if each was allocated"""
        self._watched: list[tuple[StorageWeakRef, int]] = []
        self.value: Any = tree_map_only(torch.Tensor, lambda each: self._twin(each, owned), value)

    def let_go(self) -> int:
        """Let go of the twins; return the bytes of those that nothing else holds."""
        self.value = None
        return self.freed()

    def freed(self) -> int:
        """The bytes of the twins that have been let go of since somebody asked."""
        gone = [(storage, size) for storage, size in self._watched if storage.expired()]
        self._watched = [each for each in self._watched if each not in gone]
        return sum(size for _, size in gone)

    def _twin(self, tensor: torch.Tensor, owned: frozenset[int]) -> torch.Tensor:
        if owned.issuperset(storages([tensor])):
            return tensor
        twin = from_dlpack(tensor.detach())
        if twin.stride() != tensor.stride():  # some releases write 1 for the stride of a side of length one
            twin = twin.as_strided(tensor.shape, tensor.stride())
        size = allocated(tensor.numel() * tensor.element_size(), tensor.device.type)
        self.nbytes += size
        self._watched.append((StorageWeakRef(twin.untyped_storage()), size))
        return twin.requires_grad_(tensor.requires_grad)


def can_be_watched(value: Any) -> bool:
    """Whether all tensors of `value` are plain memory, of which there can be twins."""
    return all(_is_plain(tensor) for tensor in tensors_in(value))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.dtype in _SHARED
        and not (tensor.is_conj() or tensor.is_neg())
    )


def run_to_release(runner: Runner, value: Any, owned: frozenset[int], meter: MemoryMeter) -> None:
    """Phases "copy" of the input, "run", and "input" and "output", in which these are let go of.

    Tensors whose storages are `owned` are not copied.
    """
    leaf = leaves_of(value)
    meter.mark("copy")
    # A copy, as if another layer had made it: the input itself has other holders, so nothing would ever be freed.
    copy = tree_map_only(torch.Tensor, partial(_copied, owned), leaf)
    meter.mark("run")
    output = runner.forward(copy)
    source = scalar_after(output)
    meter.mark("input")
    del copy
    meter.mark("output")
    del output
    meter.mark("between")
    del source


def released_bytes(phases: Mapping[str, Phase], input_bytes: int) -> tuple[int, int]:
    """Bytes of the input, and of the output, that a run with a graph does not hold on to."""
    # If the copy is not as large as the input in the chain, they are not comparable, and nothing is promised.
    whole = phases["copy"].kept == input_bytes
    return max(0, -phases["input"].kept) if whole else 0, max(0, -phases["output"].kept)


def _copied(owned: frozenset[int], tensor: torch.Tensor) -> torch.Tensor:
    return tensor if owned.issuperset(storages([tensor])) else tensor.clone()


LEAST_SHARE = 0.05
"""The part of what is saved that a way has to spare: what it costs is found by clocks, and less is lost in their
noise."""
_SCALARS = 1024
"""The most bytes that a few scalars take. CUDA allocates them in blocks of 512."""
_AROUND = 2**14
"""The most bytes that it takes to run a stage again beside the stage: scalars, and two random states of 5 kB."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Measured bytes of a stage, as in `StageCost`."""

    activation_bytes: int
    saved_bytes: int
    forward_temp_bytes: int
    nograd_temp_bytes: int
    backward_temp_bytes: int
    replay_temp_bytes: int
    input_released_bytes: int
    output_released_bytes: int
    gradient_storage_bytes: tuple[int, ...]


class Freed(NamedTuple):
    """Bytes of a stage's input and output that are freed once a graph of it is all that holds them."""

    input: int
    output: int


class Made(NamedTuple):
    """Bytes of what a stage returns, and beside these, of what is carried and was made in it."""

    activation_bytes: int
    carried_bytes: int


class GraphBytes(NamedTuple):
    """What a run of a stage with a graph keeps and takes at most, beyond what was held when it began; and the most that
    is held in its backward, beyond what was held when the forward had ended. None if nobody has watched what is freed.
    """

    kept: int
    rise: int
    backward: int
    freed: Freed | None


class WayBytes(NamedTuple):
    """What a stage takes in one way, in both graphs, and the bytes behind the gradients of its input's tensors."""

    training: GraphBytes
    own: GraphBytes
    gradients: tuple[int, ...]

    @property
    def kept(self) -> int:
        return max(self.training.kept, self.own.kept)


def clearly_less(saved: int, than: int) -> bool:
    """Whether a way saves so much less than another one that takes less time, that a plan may want it."""
    return saved <= (1 - LEAST_SHARE) * than and saved < than


def least(found: Sequence[StageBytes]) -> StageBytes:
    """The least that a stage held and needed in several runs, and the most that it freed."""
    saved = min(each.saved_bytes for each in found)
    return replace(
        found[0],
        saved_bytes=saved,
        forward_temp_bytes=min(each.saved_bytes + each.forward_temp_bytes for each in found) - saved,
        nograd_temp_bytes=min(each.nograd_temp_bytes for each in found),
        backward_temp_bytes=min(each.backward_temp_bytes for each in found),
        replay_temp_bytes=min(each.replay_temp_bytes for each in found),
        input_released_bytes=max(each.input_released_bytes for each in found),
        output_released_bytes=min(saved, max(each.output_released_bytes for each in found)),
    )


def in_training(phases: Mapping[str, Phase], twins: Freed | None) -> GraphBytes:
    """What a run in training's graph takes, by its phases and the `twins` that were freed (`run_in_graph`)."""
    forward = phases["forward"]
    # From the end of the forward on: an output that the stage's own backward does not need may be gone.
    most = max((phases[name].peak for name in ("gradients", "backward") if name in phases), default=forward.end)
    return GraphBytes(forward.kept, forward.rise, most - forward.end, _freed(phases["end of forward"], twins))


def in_own(phases: Mapping[str, Phase], twins: Freed | None, context: StageContext) -> GraphBytes:
    """What a run with a graph of its own takes, as `in_training` (`run_with_own_graph`)."""
    attach, letting_go = phases["attach"], phases["letting go"]
    most = max(letting_go.peak, phases["replay"].peak) - letting_go.start + phases["gradient"].kept
    freed = _freed(letting_go, twins)
    if freed is None:
        freed = Freed(*released_bytes(phases, context.input_bytes))
    return GraphBytes(attach.kept, attach.rise, most, freed)


def _freed(letting_go: Phase, twins: Freed | None) -> Freed | None:
    """What is freed while the output is let go of, with the twins of tensors that are still there."""
    return None if twins is None else Freed(twins.input, max(0, twins.output - letting_go.kept))


def _in_own_by_training(phases: Mapping[str, Phase], training: GraphBytes) -> GraphBytes | None:
    """What a graph of its own is expected to take, by a run in training's; None if nothing shows it.

    They differ in gradients, of the output and of parameters: training's graph holds them until they are used, and its
    own to the end. So it has to be seen when each of them is freed: a way may need the most later than another one.
    """
    most = phases["backward"].peak_with_held if "backward" in phases else None
    if most is None:
        return None
    return training._replace(backward=max(phases["gradients"].peak, most) - phases["forward"].end)


class Beyond(NamedTuple):
    """What a graph of its own takes beyond what is expected by a run in training's: the same, whatever the way."""

    kept: int
    rise: int
    backward: int

    def add_to(self, phases: Mapping[str, Phase], training: GraphBytes) -> GraphBytes:
        """What a graph of its own takes in another way, by a run in training's."""
        expected = _in_own_by_training(phases, training)
        assert expected is not None  # as for the stage stored whole
        kept, rise, backward, freed = expected
        # Another way may hold the most at the end of its forward.
        return GraphBytes(kept + self.kept, rise + max(self.rise, self.kept), backward + self.backward, freed)


def beyond_training(phases: Mapping[str, Phase], training: GraphBytes, own: GraphBytes) -> Beyond | None:
    """How much more a graph of its own takes; None if that is not to be expected by a run in training's.

    Ways differ in what they make again, in the backward of either graph. So where the run of one way shows what is
    expected, but for a little that is there beside the stage, it holds for the others.
    """
    expected = _in_own_by_training(phases, training)
    if expected is None or own.freed != expected.freed:
        return None
    more = Beyond(own.kept - expected.kept, own.rise - expected.rise, own.backward - expected.backward)
    little = max(abs(more.kept), abs(more.rise)) <= _AROUND and abs(more.backward) <= _SCALARS
    return more if little else None


def bytes_of(way: WayBytes, made: Made, context: StageContext, nograd_temp: int) -> StageBytes:
    """The bytes of a stage in one way, with those that runs without a graph have shown."""
    training, own, gradients = way
    # One number serves both ways to run a stage with a graph, in training's graph and in its own: the larger.
    saved = max(0, way.kept - made.carried_bytes)
    both = made.activation_bytes + context.input_bytes
    assert own.freed is not None
    return StageBytes(
        activation_bytes=made.activation_bytes,
        saved_bytes=saved,
        forward_temp_bytes=max(training.rise, own.rise) - saved,
        nograd_temp_bytes=nograd_temp,
        # What the solver adds by itself is taken off: the gradients of output and input, as large as these are.
        backward_temp_bytes=max(-context.input_bytes, training.backward - both),
        replay_temp_bytes=max(-context.input_bytes, own.backward - both),
        input_released_bytes=own.freed.input,
        output_released_bytes=min(own.freed.output, made.activation_bytes, saved),
        gradient_storage_bytes=gradients,
    )
