"""Merge neighbouring stages into groups: for a quick first plan of any chain, and for all plans of very long chains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from rotor_solver.chain import Chain, Option, Stage
from rotor_solver.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence

# Upper bound of the number of stages of a chain that is planned without merging stages. Its tables then have up to
# 2 GiB. Not measured; more stages cost memory and minutes.
_LONGEST = 2500
_GROUPS = 400  # Number of groups of a longer chain. Not measured; more cost seconds, fewer raise the least limit.


def joined(chain: Chain) -> list[range] | None:
    """Return the groups in which a very long chain's stages are merged before planning; None for other chains.

    Groups have nearly equal lengths: each begins at the smallest activation near the start of an equal share.
    """
    length = len(chain)
    if length <= _LONGEST:
        return None
    size = length / _GROUPS
    activation, near = np.array(chain.activation), int(size / 4)
    starts = [0]
    for number in range(1, _GROUPS):
        first = int(number * size) - near
        starts.append(first + int(activation[first : first + 2 * near + 1].argmin()))
    return [range(low, high) for low, high in pairwise([*starts, length])]


def stored_bound(chain: Chain, mem_limit: int, stored: float) -> float:
    """Return a lower bound of the seconds of sequences within `mem_limit`; storing everything takes `stored` seconds.

    A stage that is not in memory when the loss runs is recomputed at least once. Which stages to store is a knapsack
    problem: in the order of seconds saved per byte, the last one in part, they save at least as much as any that fit.
    """
    seconds, room = stored, float(mem_limit - chain.input_bytes - chain.activation[-1] - chain.loss_temp)
    items: list[tuple[float, float]] = []  # Seconds that storing a stage saves, and the bytes that it takes
    for stage, released in zip(chain.stages, chain.released, strict=True):
        again = stage.seconds_without_graph - stage.skipped_output_time
        fastest = min(option.forward_time + option.backward_time for option in stage.options)
        costs = [
            (each.forward_time + each.backward_time - fastest, each.kept - max(released)) for each in stage.options
        ]
        gains = [(again - extra, size) for extra, size in costs if extra < again]
        least = min(size for _, size in costs)
        seconds += again
        room -= min(0, least)
        if gains:
            most = max(gain for gain, _ in gains)
            rate = max(gain / size if size > 0 else math.inf for gain, size in gains)
            items.append((most, most / rate))
    for gain, size in sorted(items, key=lambda item: item[1] / item[0]):
        seconds -= gain * (min(1.0, max(0.0, room) / size) if size else 1.0)
        room -= size
    return max(stored, seconds * (1 - 1e-9))  # a margin, as sums in another order differ in their last digits


def coarse_chain(chain: Chain, groups: list[range]) -> Chain:
    """Merge every group into one stage that costs at least the memory and time of the group's fastest options."""
    # The coarse chain frees no bytes of inputs after a forward with a graph: so it needs no less memory.
    activation = chain.activation
    held = activation[-1] if chain.output_held else 0
    stages = [
        _merged(chain.stages[group.start : group.stop], activation[group.start], held * (group.stop == len(chain)))
        for group in groups
    ]
    return Chain(tuple(stages), chain.input_bytes, chain.loss_time, chain.loss_temp, chain.output_held)


def fine_sequence(chain: Chain, groups: list[range], coarse: Iterable[Operation]) -> Sequence:
    """Expand `coarse`, a sequence for `coarse_chain`, into one for the chain itself."""
    found: list[Operation] = []
    for operation in coarse:
        match operation:
            case Loss():
                found.append(operation)
            case ForwardEnable(group):
                found += [ForwardEnable(i, chain.stages[i].fastest_option) for i in groups[group]]
            case ForwardCheck(group):
                found += [ForwardCheck(groups[group].start), *map(ForwardNograd, groups[group][1:])]
            case ForwardNograd(group):
                found += map(ForwardNograd, groups[group])
            case Backward(group):
                found += map(Backward, reversed(groups[group]))
    return Sequence(found)


def _merged(stages: tuple[Stage, ...], incoming: int, held: int) -> Stage:
    """Return a group as one stage. `held`: bytes of its output if that is the chain's and the caller keeps it."""
    options = [stage.options[stage.fastest_option] for stage in stages]
    inputs = [incoming, *(stage.activation for stage in stages)]
    outgoing = inputs[-1]
    saved, forward_most, backward_most, check_most = 0, 0, 0, 0
    later = sum(stage.gradient for stage in stages)
    for k, (stage, option) in enumerate(zip(stages, options, strict=True)):
        saved += option.kept
        later -= stage.gradient
        forward_most = max(forward_most, saved + option.forward_temp)
        temp = max(option.backward_temp, option.backward_temp_of_replay)
        backward_most = max(
            backward_most, saved + inputs[k] + inputs[k + 1] + temp + later + held * (stage is not stages[-1])
        )
        check_most = max(check_most, (inputs[k] if k else 0) + stage.activation + stage.temp_without_graph)
    option = Option(
        forward_time=sum(option.forward_time for option in options),
        backward_time=sum(option.backward_time for option in options),
        saved=saved,
        forward_temp=forward_most - saved,
        backward_temp=max(-incoming, backward_most - saved - incoming - outgoing),
    )
    return Stage(
        activation=outgoing,
        options=(option,),
        nograd_time=sum(stage.seconds_without_graph for stage in stages),
        nograd_temp=max(0, check_most - outgoing),
        gradient=sum(stage.gradient for stage in stages),
        skipped_output_time=stages[-1].skipped_output_time,
    )
