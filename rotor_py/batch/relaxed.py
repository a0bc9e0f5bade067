"""A step that costs no more than those of a whole range of batches: what bounds them all from below.

In a range of batches, let `most` be the largest. A plan for any batch of the range holds at least what it would hold
with the least bytes of the range, so it fits there too; and for each of its operations, seconds per sample are at least
the least in the range. So it takes, per sample, at least

    T(least bytes, most · least seconds per sample) / most

where T is the time of the fastest plan, or a lower bound for it. Between two measured batches costs are affine, a +
b·n, and seconds per sample are a/n + b, which go one way. So the least of anything is at a measured batch, or at an
end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from rotor_solver import Chain, Option, Stage
from rotor_solver.chain import LARGEST_SIZE


def relaxed(chains: Sequence[Chain], batches: Sequence[int]) -> Chain | None:
    """The chain of least costs, in seconds of a step of the largest batch; None if no such chain is known.

    `chains` are those of `batches`, which increase: both ends of a range, and between them all batches where costs
    bend. What is held has to grow with the batch. Scratch memory need not.
    """
    if len({tuple(stage.name for stage in chain) for chain in chains}) > 1:
        return None
    scales = [batches[-1] / batch for batch in batches]
    stages = tuple(
        _stage(same, [chain.activation[number] for chain in chains], scales)
        for number, same in enumerate(zip(*(chain.stages for chain in chains), strict=True))
    )
    found = replace(
        chains[0],
        stages=stages,
        loss_time=_least([chain.loss_time for chain in chains], scales),
        loss_temp=min(chain.loss_temp for chain in chains),
    )
    held = _held(found)
    return found if all(held[what] <= size for chain in chains for what, size in _held(chain).items()) else None


def _ways(stage: Stage) -> dict[int | str, Option]:
    """The ways to run a stage, by name if they have one: not all batches need to have the same."""
    return {option.name or number: option for number, option in enumerate(stage.options)}


def _held(chain: Chain) -> dict[tuple[str, int, int | str], int]:
    """Every amount that a sequence adds to memory, by what it is, of which stage and way.

    Scratch memory is there together with what the operation makes, or has: it may be below zero by itself.
    """
    found: dict[tuple[str, int, int | str], int]
    found = {("input", number, 0): size for number, size in enumerate(chain.activation)}
    for number, (stage, (alone, inside)) in enumerate(zip(chain, chain.released, strict=True)):
        incoming = chain.activation[number]
        found["left of the input", number, 0] = incoming - alone
        found["without a graph", number, 0] = stage.activation + stage.temp_without_graph
        for way, option in _ways(stage).items():
            found["saved", number, way] = option.saved
            found["forward", number, way] = option.saved + option.forward_temp
            beside = incoming + stage.activation + option.saved
            found["backward", number, way] = beside + option.backward_temp
            found["backward of a replay", number, way] = beside + option.backward_temp_of_replay
        for way, option in _ways(chain.stages[number - 1]).items() if number else ():
            found["left of saved", number, way] = option.saved - inside
    gradients = accumulate(stage.gradient for stage in reversed(chain.stages))
    return found | {("gradients", number, 0): size for number, size in enumerate(gradients)}


def _stage(same: Sequence[Stage], incoming: Sequence[int], scales: Sequence[float]) -> Stage:
    """The stage of the least batch, with the least scratch memory and the least seconds for each sample of any.

    `incoming` are the bytes of its inputs. It can run in every way in which any of them can.
    """
    options, left = [], []
    for way in dict.fromkeys(way for stage in same for way in _ways(stage)):
        having = [each for each in zip(same, incoming, scales, strict=True) if way in _ways(each[0])]
        theirs = [scale for _, _, scale in having]
        beside = [size + stage.activation for stage, size, _ in having]
        here = incoming[0] + same[0].activation
        options.append(_option([_ways(stage)[way] for stage, _, _ in having], beside, here, incoming[0], theirs))
        # A forward may skip its output: what is left of it then is bounded as well.
        rest = [_ways(stage)[way].forward_time - stage.skipped_output_time for stage, _, _ in having]
        left.append(_least(rest, theirs))
    nograd = _least([stage.seconds_without_graph for stage in same], scales)
    skipped = max(0.0, *(option.forward_time - rest for option, rest in zip(options, left, strict=True)))
    skipped = min(skipped, nograd, *(option.forward_time for option in options))
    return replace(
        same[0],
        options=tuple(
            # Where a stage has one number for all ways, and they differ, the forward is lowered.
            replace(option, forward_time=min(option.forward_time, skipped + rest))
            for option, rest in zip(options, left, strict=True)
        ),
        nograd_time=nograd,
        nograd_temp=max(0, min(stage.activation + stage.temp_without_graph for stage in same) - same[0].activation),
        skipped_output_time=skipped,
    )


def _option(ways: Sequence[Option], beside: Sequence[int], here: int, incoming: int, scales: Sequence[float]) -> Option:
    """The least of one way to run a stage; `beside` are the bytes of input and output for each, and `here` of the
    first.

    Sizes are bounded so that they may be a stage's. One that is too large then is found by its sum.
    """
    saved = min(way.saved for way in ways)

    def scratch(temp: Callable[[Option], int]) -> int:
        together = min(size + way.saved + temp(way) for size, way in zip(beside, ways, strict=True))
        return min(LARGEST_SIZE, max(-incoming, together - here - saved))

    return replace(
        ways[0],
        forward_time=_least([way.forward_time for way in ways], scales),
        backward_time=_least([way.backward_time for way in ways], scales),
        saved=saved,
        forward_temp=min(way.saved + way.forward_temp for way in ways) - saved,
        backward_temp=scratch(lambda way: way.backward_temp),
        replay_temp=scratch(lambda way: way.backward_temp_of_replay),
    )


def _least(seconds: Sequence[float], scales: Sequence[float]) -> float:
    return min(each * scale for each, scale in zip(seconds, scales, strict=True))
