"""Chains for hypothesis whose stages may move a part of what they keep."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from rotor_solver import Chain, Option, Stage
from rotor_solver.moving import Link
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
