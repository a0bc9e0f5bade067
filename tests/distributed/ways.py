"""Plans that choose other ways to store stages than whole, whatever clocks say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rotor_profiling import StageCost
from rotor_py.measure import stage_measurer
from rotor_py.measure.measurement import Way


@contextmanager
def free_to_store_in_part() -> Iterator[None]:
    """Ways to store a stage seem to take no time, so that plans choose them."""

    def at_no_cost(whole: StageCost, ways: Sequence[Way]) -> tuple[Way, ...]:
        seconds = {"forward_seconds": whole.forward_seconds, "backward_seconds": whole.backward_seconds}
        return tuple(Way(each.name, replace(each.cost, **seconds)) for each in ways)

    usual = stage_measurer.worth_choosing
    try:
        stage_measurer.worth_choosing = at_no_cost
        yield
    finally:
        stage_measurer.worth_choosing = usual
