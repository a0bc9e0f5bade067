"""Bytes of one stage in one storage mode, held and temporary, from the phases of its runs."""

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

# Input and output bytes that a run with a graph frees.
#
# Most inputs can be observed directly (`WatchedInput`). Tensor subclasses and fake tensors cannot: the run releases a
# copy of them instead.


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SHARED = frozenset((*_FLOATS, *_INTEGERS))
"""Dtypes that every torch release exchanges with itself by DLPack."""


class WatchedInput:
    """`value` with aliases of its tensors over the same memory, each with a storage of its own.

    The tensors themselves have other holders while their stage is measured, which hide whether a graph holds them. A
    copy would take as much memory again. Tensors with `owned` storages are no part of the input, and are not aliased.
    """

    def __init__(self, value: Any, owned: frozenset[int]) -> None:
        self.nbytes = 0
        """bytes of all aliases, as if each was allocated"""
        self._watched: list[tuple[StorageWeakRef, int]] = []
        self.value: Any = tree_map_only(torch.Tensor, lambda each: self._twin(each, owned), value)

    def let_go(self) -> int:
        """Release the aliases; return the bytes that nothing else holds."""
        self.value = None
        return self.freed()

    def freed(self) -> int:
        """Return the bytes of aliases freed since the last call."""
        gone = [(storage, size) for storage, size in self._watched if storage.expired()]
        self._watched = [each for each in self._watched if each not in gone]
        return sum(size for _, size in gone)

    def _twin(self, tensor: torch.Tensor, owned: frozenset[int]) -> torch.Tensor:
        if owned.issuperset(storages([tensor])):
            return tensor
        twin = from_dlpack(tensor.detach())
        if twin.stride() != tensor.stride():  # some releases write stride 1 for sides of length one
            twin = twin.as_strided(tensor.shape, tensor.stride())
        size = allocated(tensor.numel() * tensor.element_size(), tensor.device.type)
        self.nbytes += size
        self._watched.append((StorageWeakRef(twin.untyped_storage()), size))
        return twin.requires_grad_(tensor.requires_grad)


def can_be_watched(value: Any) -> bool:
    """Whether all tensors of `value` are plain memory, which can be aliased."""
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
    """Run phases "copy" of the input, "run", and "input" and "output", in which these are released.

    Tensors with `owned` storages are not copied.
    """
    leaf = leaves_of(value)
    meter.mark("copy")
    # A copy, as if another layer had made it: the input itself has other holders and would never be freed.
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
    """Return the bytes of input and output that a run with a graph frees."""
    # A copy of another size than the chain's input is not comparable, so nothing is promised.
    whole = phases["copy"].kept == input_bytes
    return max(0, -phases["input"].kept) if whole else 0, max(0, -phases["output"].kept)


def _copied(owned: frozenset[int], tensor: torch.Tensor) -> torch.Tensor:
    return tensor if owned.issuperset(storages([tensor])) else tensor.clone()


LEAST_SHARE = 0.05
"""Minimum share of the saved bytes that a mode must spare: its cost in time is known only up to clock noise."""
_SCALARS = 1024
"""Most bytes of a few scalars. CUDA allocates them in blocks of 512."""
_AROUND = 2**14
"""Most bytes that a recomputation adds to the stage's own: scalars, and two RNG states of 5 kB."""


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
    """Bytes of a stage's input and output that are freed once only its graph holds them."""

    input: int
    output: int


class Made(NamedTuple):
    """Bytes of a stage's output, and of further carried tensors made in it."""

    activation_bytes: int
    carried_bytes: int


class GraphBytes(NamedTuple):
    """Bytes of a stage's run with a graph.

    `kept` and `rise` (peak) are relative to its start; `backward`, the peak of the backward, to the end of the forward.
    `freed` is None if not observed.
    """

    kept: int
    rise: int
    backward: int
    freed: Freed | None


class WayBytes(NamedTuple):
    """Bytes of a stage in one storage mode, in both graphs, and those of its input gradients' storages."""

    training: GraphBytes
    own: GraphBytes
    gradients: tuple[int, ...]

    @property
    def kept(self) -> int:
        return max(self.training.kept, self.own.kept)


def clearly_less(saved: int, than: int) -> bool:
    """Whether a mode saves enough less than a faster one to be worth planning with."""
    return saved <= (1 - LEAST_SHARE) * than and saved < than


def least(found: Sequence[StageBytes]) -> StageBytes:
    """Return the least bytes held and needed over several runs, and the most freed."""
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
    """Return the bytes of a run in training's graph, from its phases and the freed aliases (`run_in_graph`)."""
    forward = phases["forward"]
    # After the forward: an output that the stage's own backward does not need may be gone.
    most = max((phases[name].peak for name in ("gradients", "backward") if name in phases), default=forward.end)
    return GraphBytes(forward.kept, forward.rise, most - forward.end, _freed(phases["end of forward"], twins))


def in_own(phases: Mapping[str, Phase], twins: Freed | None, context: StageContext) -> GraphBytes:
    """Return the bytes of a run with a graph of its own (`run_with_own_graph`)."""
    attach, letting_go = phases["attach"], phases["letting go"]
    most = max(letting_go.peak, phases["replay"].peak) - letting_go.start + phases["gradient"].kept
    freed = _freed(letting_go, twins)
    if freed is None:
        freed = Freed(*released_bytes(phases, context.input_bytes))
    return GraphBytes(attach.kept, attach.rise, most, freed)


def _freed(letting_go: Phase, twins: Freed | None) -> Freed | None:
    """Return the bytes freed when the output is released, including aliases of tensors still held."""
    return None if twins is None else Freed(twins.input, max(0, twins.output - letting_go.kept))


def _in_own_by_training(phases: Mapping[str, Phase], training: GraphBytes) -> GraphBytes | None:
    """Predict the bytes of a stage's own graph from a run in training's; None if not possible.

    The graphs differ in gradients of output and parameters: training's graph holds them until used, its own to the end.
    So each free must be visible, since modes may peak at different times.
    """
    most = phases["backward"].peak_with_held if "backward" in phases else None
    if most is None:
        return None
    return training._replace(backward=max(phases["gradients"].peak, most) - phases["forward"].end)


class Beyond(NamedTuple):
    """Bytes of a stage's own graph beyond the prediction from training's; the same in every storage mode."""

    kept: int
    rise: int
    backward: int

    def add_to(self, phases: Mapping[str, Phase], training: GraphBytes) -> GraphBytes:
        """Return the bytes of the stage's own graph in another mode, from a run in training's."""
        expected = _in_own_by_training(phases, training)
        assert expected is not None  # as for the stage stored whole
        kept, rise, backward, freed = expected
        # Another mode may peak at the end of its forward.
        return GraphBytes(kept + self.kept, rise + max(self.rise, self.kept), backward + self.backward, freed)


def beyond_training(phases: Mapping[str, Phase], training: GraphBytes, own: GraphBytes) -> Beyond | None:
    """Return the excess of a stage's own graph over its prediction; None if the prediction fails.

    Modes differ in their recomputations, which happen in the backward of either graph. So if the prediction holds for
    one mode, up to a few bytes outside the stage, it holds for the others.
    """
    expected = _in_own_by_training(phases, training)
    if expected is None or own.freed != expected.freed:
        return None
    more = Beyond(own.kept - expected.kept, own.rise - expected.rise, own.backward - expected.backward)
    little = max(abs(more.kept), abs(more.rise)) <= _AROUND and abs(more.backward) <= _SCALARS
    return more if little else None


def bytes_of(way: WayBytes, made: Made, context: StageContext, nograd_temp: int) -> StageBytes:
    """Combine the bytes of a stage in one mode with those of runs without a graph."""
    training, own, gradients = way
    # One number serves both graphs, training's and the stage's own: the larger.
    saved = max(0, way.kept - made.carried_bytes)
    both = made.activation_bytes + context.input_bytes
    assert own.freed is not None
    return StageBytes(
        activation_bytes=made.activation_bytes,
        saved_bytes=saved,
        forward_temp_bytes=max(training.rise, own.rise) - saved,
        nograd_temp_bytes=nograd_temp,
        # Without the gradients of output and input, of the same sizes, which the solver adds.
        backward_temp_bytes=max(-context.input_bytes, training.backward - both),
        replay_temp_bytes=max(-context.input_bytes, own.backward - both),
        input_released_bytes=own.freed.input,
        output_released_bytes=min(own.freed.output, made.activation_bytes, saved),
        gradient_storage_bytes=gradients,
    )
