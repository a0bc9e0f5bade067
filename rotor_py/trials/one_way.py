"""The best plans with fewer ways to keep what stages save: what each of the ways is worth by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotor_py.measure.measurement import Measurement
from rotor_py.stage.keepers.fewer_bits import FEWER_BITS
from rotor_py.stage.keepers.packed import Packed
from rotor_py.stage.ways.elsewhere import ELSEWHERE
from rotor_solver import Algorithm, Chain, ForwardEnable, Persistent, Sequence
from rotor_solver.moving import Link, solve_moving

_KEEPERS = (Packed().name, *(form.name for form in FEWER_BITS.values()), ELSEWHERE.name)


def one_way_each(measurement: Measurement, slots: int, link: Link | None = None) -> dict[str, Algorithm]:
    """By name: stages stored whole or not at all, and then whole or by one of the ways that are known of any stage.

    Nothing where there are no other ways. A single one, which is in the best plan already, has no row of its own.
    """
    own = {name for names in measurement.way_names for name in names if not name.endswith(_KEEPERS)}
    families = {"in part": own, **{name: {name} for name in _KEEPERS}}
    known = {name for names in measurement.way_names for name in names}
    present = {family: names for family, names in families.items() if names & known}
    if not known:
        return {}
    named = {"optimal, whole": set[str](), **{f"optimal, {family}": names for family, names in present.items()}}
    if len(present) == 1 and known == next(iter(present.values())):
        del named[f"optimal, {next(iter(present))}"]
    return {
        name: OneWay(name, _positions(measurement, ways), slots, link if ELSEWHERE.name in ways else None)
        for name, ways in named.items()
    }


def _positions(measurement: Measurement, ways: set[str]) -> tuple[tuple[int, ...], ...]:
    """Of every stage, the options that store it whole or by one of `ways`."""
    return tuple(
        (0, *(option for option, name in enumerate(names, 1) if name in ways)) for names in measurement.way_names
    )


@dataclass(frozen=True, slots=True)
class OneWay:
    """The best sequence that runs each stage by one of `options`, which are those of the whole chain."""

    name: str
    options: tuple[tuple[int, ...], ...]
    slots: int
    link: Link | None = None

    def solve(self, chain: Chain, mem_limit: int) -> Sequence:
        """A sequence for `chain` within `mem_limit` bytes. InfeasibleError if there is none."""
        stages = tuple(
            replace(stage, options=tuple(stage.options[option] for option in options))
            for stage, options in zip(chain, self.options, strict=True)
        )
        fewer = replace(chain, stages=stages)
        moves = None
        if self.link is None:
            found = Persistent(self.slots).solve(fewer, mem_limit)
        else:
            plan = solve_moving(fewer, mem_limit, self.link, self.slots)
            found, moves = plan.sequence, plan.moves if plan.moves.stages else None
        operations = [
            ForwardEnable(each.stage, self.options[each.stage][each.option])
            if isinstance(each, ForwardEnable)
            else each
            for each in found
        ]
        return Sequence(operations, found.algorithm, found.lower_bound, moves=moves)
