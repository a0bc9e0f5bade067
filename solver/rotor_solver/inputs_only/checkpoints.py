"""What the classical strategies share: chains with one option per stage, and which of several schedules to take."""

from __future__ import annotations

from dataclasses import replace

from rotor_solver.arrays.choices import operations_of
from rotor_solver.chain import Chain
from rotor_solver.limits import InfeasibleError
from rotor_solver.sequence import Sequence


def with_fastest_options(chain: Chain) -> Chain:
    """The chain with one option per stage, the fastest."""
    stages = (
        replace(
            stage,
            options=(stage.options[stage.fastest_option],),
            nograd_time=stage.seconds_without_graph,
            nograd_temp=stage.temp_without_graph,
        )
        for stage in chain.stages
    )
    return replace(chain, stages=tuple(stages))


def input_sequence(chain: Chain, checkpoints: dict[tuple[int, int], int], name: str) -> Sequence:
    """The sequence that splits the interval [i, l] at checkpoints[i, l], and begins it with Fe_i if there is none."""
    options = [stage.fastest_option for stage in chain.stages]

    def choose(_state: int, i: int, last: int) -> int:
        return -checkpoints[i, last] if (i, last) in checkpoints else options[i]

    return Sequence(operations_of(len(chain), choose), name)


def fastest_fitting(name: str, mem_limit: int, schedules: list[tuple[float, int]]) -> int:
    """The index of the fastest of `schedules`, given as (seconds, bytes at their peak), within `mem_limit` bytes.

    Raises InfeasibleError if none fits.
    """
    fitting = [index for index, (_, peak) in enumerate(schedules) if peak <= mem_limit]
    if not fitting:
        needed = min(peak for _, peak in schedules)
        raise InfeasibleError(
            f"{name} needs at least {needed} bytes; the limit is {mem_limit}", min_bytes=needed, mem_limit=mem_limit
        )
    return min(fitting, key=lambda index: schedules[index])


def checked_count(value: object, what: str, thing: str) -> None:
    """Raise ValueError unless `value` is None or a whole number, one or more."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{what} is {value!r}; it has to be a whole number of {thing}, one or more, or None")
