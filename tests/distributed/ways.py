"""Plans that choose other ways to store stages than whole, whatever clocks say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rotor_profiling.stage.seconds import StageRun, StageSeconds
from rotor_py.measure import rounds


@contextmanager
def free_to_store_in_part() -> Iterator[None]:
    """All stages seem to take as long, and ways to store them no time, so that plans choose them, and the same ones."""

    def alike(runs: Sequence[StageRun]) -> list[StageSeconds]:
        return [StageSeconds(1.0, 1.0, 2.0, 0.0)] * len(runs[0].ways)

    usual = rounds.estimate
    try:
        rounds.estimate = alike
        yield
    finally:
        rounds.estimate = usual
