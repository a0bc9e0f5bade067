"""How well times have to be known, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """How well the time of a step has to be known, and how long its stages are timed for that.

    Times are good enough if that of a whole step is known as well as `good`, a part of it, by so many runs at `least`
    of what matters. No walk begins once runs beyond the fewest have taken as long as so many plain `steps`, and stages
    of one kind are run so often at `most`.
    """

    good: float
    steps: float
    most: int
    least: int = 0


# Guesses, but for this: times that are wrong by 30 % for each stage, independently, cost a plan 1.4 % at most.
ONE_PLAN = Precision(good=0.02, steps=1, most=16)
"""For the plan within one limit: it is worth no more waiting."""
ALL_PLANS = Precision(good=0.02, steps=2, most=16)
"""Where no limit is known: the curve of all plans moves with all times."""
CLOSELY = Precision(good=0.005, steps=24, most=32, least=12)
"""For a limit that is read off the curve: GPT-2's for 20 % more time moves by 2 % where these are wrong by one. And
beside other programs, unless it is for one plan: all runs may be disturbed alike, and few are left alone. Two runs may
agree by chance: how well times are known, they do not say."""
CLOSEST = Precision(good=0.0035, steps=48, most=64, least=24)
"""For such a limit beside other programs, where steps by the plans of two commands would else differ by over 2 %."""
_BESIDE_OTHERS = {ONE_PLAN: ONE_PLAN, ALL_PLANS: CLOSELY, CLOSELY: CLOSEST, CLOSEST: CLOSEST}


def beside_others(precision: Precision) -> Precision:
    """The precision of what is timed while other programs run, where that is one of the above."""
    return _BESIDE_OTHERS.get(precision, precision)
