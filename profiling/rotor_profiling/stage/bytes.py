"""The bytes of one stage in one way: what it holds, and what it needs while it runs, from the phases of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rotor_profiling.memory import Phase
from rotor_profiling.stage.place import Place
from rotor_profiling.stage.released import WatchedInput, released_bytes
from rotor_profiling.stage.runs import Freed, WithoutGraph

LEAST_SHARE = 0.05
"""The part of what is saved that a way has to spare: what it costs is found by clocks, and less is lost in their
noise."""
_OF_SCALAR = 1024
"""The most bytes that a scalar and its gradient take, which CUDA allocates in blocks of 512."""


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


def more_in_training(phases: Mapping[str, Phase]) -> int | None:
    """How many bytes more a backward takes in training's graph than in a graph of its own, whatever the way; or None.

    They differ in the gradients of the output, which training's graph holds until they are used, and its own to the
    end. So, but for the scalar of a loss, training's takes no more. Where it takes no less, the most is held before
    they are used, or they are held to the end there as well: then the difference holds for ways that make tensors
    again, which do so at the beginning. Where it takes less, or the forwards differ, each way is measured in both.
    """
    forward, attach = phases["forward"], phases["attach"]
    if "backward" not in phases or (forward.kept, forward.rise) != (attach.kept, attach.rise):
        return None
    more = _backward_rise(phases) - _replay_rise(phases)
    return more if 0 <= more <= _OF_SCALAR else None


def _backward_rise(phases: Mapping[str, Phase]) -> int:
    # From the end of the forward on: an output that the stage's own backward does not need may be gone.
    return phases["backward"].peak - phases["forward"].end if "backward" in phases else 0


def _replay_rise(phases: Mapping[str, Phase]) -> int:
    freed = phases["letting go"]
    return max(freed.peak, phases["replay"].peak) - freed.start + phases["gradient"].kept


def bytes_of(
    phases: Mapping[str, Phase],
    known: WithoutGraph,
    place: Place,
    watched: WatchedInput | None,
    gradient_sizes: tuple[int, ...],
    freed: Freed,
    more: int | None,
) -> StageBytes:
    """The bytes of a stage in one way, but those of its runs without a graph.

    `more` is what its backward takes in training's graph beyond one of its own; None if it has run in both.
    """
    activation, replay = known.activation_bytes, _replay_rise(phases)
    forward, backward = phases["attach"], replay + (more or 0)
    if more is None:
        forward, backward = phases["forward"], _backward_rise(phases)
    if watched is None:
        input_released, output_released = released_bytes(phases, place.input_bytes)
    else:
        # If the twins are not as large as the input in the chain, they are not comparable, and nothing is promised.
        input_released = freed.input if watched.nbytes == place.input_bytes else 0
        output_released = max(0, freed.output - phases["letting go"].kept)
    # One number serves both ways to run a stage with a graph, in training's graph and in its own: the larger.
    saved = max(0, max(forward.kept, phases["attach"].kept) - known.carried_bytes)
    both = activation + place.input_bytes
    return StageBytes(
        activation_bytes=activation,
        saved_bytes=saved,
        forward_temp_bytes=max(forward.rise, phases["attach"].rise) - saved,
        nograd_temp_bytes=0,
        # What the solver adds by itself is taken off: the gradients of output and input, as large as these are.
        backward_temp_bytes=max(-place.input_bytes, backward - both),
        replay_temp_bytes=max(-place.input_bytes, replay - both),
        input_released_bytes=input_released,
        output_released_bytes=min(output_released, activation, saved),
        gradient_storage_bytes=gradient_sizes,
    )
