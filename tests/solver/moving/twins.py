"""Chains whose stages may move, a search over everything that a step may do."""

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations, product

from hypothesis import strategies as st

from rotor_solver import Backward, Chain, ForwardEnable, Loss, Option, Sequence, Stage, moments
from rotor_solver.offload import Link
from tests.solver.naive import all_sequences
from tests.solver.strategies import SCRATCH, SIZES, TIMES, rich_chains

RATES = st.sampled_from((0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 64.0))
LINKS = st.builds(Link, RATES, RATES)


@st.composite
def moving_chains(draw: st.DrawFn, max_stages: int = 5) -> Chain:
    """Rich chains, of which some options move a part of what they save, beside the output."""
    chain = draw(rich_chains(max_stages))
    return replace(chain, stages=tuple(draw(_moving(stage)) for stage in chain.stages))


@st.composite
def _moving(draw: st.DrawFn, stage: Stage) -> Stage:
    options = list(stage.options)
    for option in stage.options:
        if draw(st.booleans()):
            moved = draw(st.integers(0, option.saved - min(option.saved, stage.output_released)))
            more = draw(st.integers(0, 8))
            options.append(replace(option, saved=option.saved - moved, moved=moved + more))
    return replace(stage, options=tuple(draw(st.permutations(options))))


@st.composite
def tiny_chains(draw: st.DrawFn, max_stages: int = 3) -> Chain:
    """Chains whose every stage keeps something large, which may be moved, and little else: for naive twins."""
    stages = []
    for _ in range(draw(st.integers(1, max_stages))):
        activation, forward, backward = draw(st.integers(0, 3)), draw(TIMES), draw(TIMES)
        inside, scratch = draw(st.integers(0, 8)), draw(SCRATCH)
        stored = Option(forward, backward, activation + inside, scratch, scratch)
        slower = forward + draw(st.sampled_from((0.0, 0.0, 2.0)))
        moving = replace(stored, forward_time=slower, saved=activation, moved=inside)
        quicker = draw(st.sampled_from((forward, forward, forward / 2)))
        stages.append(Stage(activation, (stored, moving) if inside else (stored,), nograd_time=quicker))
    return Chain(tuple(stages), draw(SIZES), draw(TIMES), draw(st.integers(0, 4)))


Trip = tuple[int, int, int]
"""Where bytes are made, where they are read, and how many they are."""


def exhaustive_moving_optimum(chain: Chain, limit: int, link: Link) -> float:
    """The least seconds of all sequences with all timetables of all that may move; infinite if nothing fits."""
    best = math.inf
    for sequence in all_sequences(chain):
        steps = moments(chain, sequence)
        if sum(step.seconds for step in steps) >= best:
            continue
        possible = possible_trips(chain, sequence)
        for trips in (each for count in range(len(possible) + 1) for each in combinations(possible, count)):
            best = min(best, best_timetable(chain, sequence, trips, limit, link))
    return best


def possible_trips(chain: Chain, sequence: Sequence) -> list[Trip]:
    operations = list(sequence)
    return [
        (place, operations.index(Backward(each.stage)), chain.stages[each.stage].options[each.option].moved)
        for place, each in enumerate(operations[: operations.index(Loss())])
        if isinstance(each, ForwardEnable) and chain.stages[each.stage].options[each.option].moved
    ]


def best_timetable(chain: Chain, sequence: Sequence, trips: Collection[Trip], limit: int, link: Link) -> float:
    """The least seconds in which exactly these trips are made inside the limit, waits and fetches tried everywhere."""
    steps = moments(chain, sequence)
    after_loss = sequence.operations.index(Loss()) + 1
    best = math.inf
    leaves = product(*(range(forward + 1, after_loss + 1) for forward, _, _ in trips))
    returns = [*product(*(range(after_loss, backward + 1) for _, backward, _ in trips))]
    for waits, fetches in product(leaves, returns):
        away = list(zip(trips, waits, fetches, strict=True))
        held = [
            step.during - sum(moved for (_, _, moved), wait, fetch in away if wait <= place < fetch)
            for place, step in enumerate(steps)
        ]
        if max(held) <= limit:
            best = min(best, _seconds([step.seconds for step in steps], away, link))
    return best


def _seconds(steps: list[float], away: list[tuple[Trip, int, int]], link: Link) -> float:
    now = out_free = in_free = 0.0
    out_end, in_end = {}, {}
    for place, seconds in enumerate(steps):
        now = max([now, *(out_end[trip] for trip, wait, _ in away if wait == place)])
        for trip, _, fetch in sorted(away, key=lambda each: each[0][1]):
            if fetch == place:
                in_free = in_end[trip] = max(in_free, now) + trip[2] / link.in_bytes_per_second
        now = max([now, *(in_end[trip] for trip, _, _ in away if trip[1] == place)]) + seconds
        for trip, _, _ in away:
            if trip[0] == place:
                out_free = out_end[trip] = max(out_free, now) + trip[2] / link.out_bytes_per_second
    return now
