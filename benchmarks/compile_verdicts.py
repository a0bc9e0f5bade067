"""Whether planned and compiled is no slower than other ways to train, at their peaks.

    stored       everything stored, beside torch.compile without a budget: within 3 %, whatever its peak
    at a peak    beside each budget of torch.compile, and each plan that runs uncompiled: no slower. Its row is that of
                 the plan that was made for the budget's peak, or for the limit of the other plan; without such a plan,
                 the one of the highest peak that is not above

Ratios are medians over turns, each with one step of all ways. How well they are known shows a copy of the model that
runs the same code: its ratio would be 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rotor_py import format_bytes

Kind = Literal["eager", "compiled", "copy", "all saved", "budget", "checkpointed", "planned", "ours"]

WITHIN = 0.03
"""How much longer than torch.compile a step may take that stores everything."""
NOISE = 0.02
"""By how much two ratios may differ for nothing, at least: the copy is one sample."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A way to train: its peak in bytes, and the seconds of a step in each turn."""

    name: str
    kind: Kind
    peak: int
    seconds: Sequence[float]
    limit: int | None = None
    """The bytes that a plan was made for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ours` beside `other`: `ratio` times as long in the median, in half of the turns between `low` and `high`.

    Without `ours`, nothing of ours runs at the peak of the other. `allowed` is the ratio up to which it counts.
    """

    other: Timed
    ours: Timed | None
    allowed: float
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    noise: float = NOISE

    @property
    def word(self) -> str:
        """What it comes to, in a word or two."""
        if self.ours is None:
            return "**no plan**"
        if self.ours.kind == "copy":
            return "the same code"
        if self.ratio <= self.allowed:
            return "yes"
        return "within noise" if self.ratio <= self.allowed + self.noise and self.low <= self.allowed else "**no**"


def verdicts(found: Sequence[Timed]) -> list[Verdict]:
    """Of all ways to train one model: first that everything is stored, then at each peak."""
    ours = sorted((each for each in found if each.kind == "ours"), key=lambda each: each.peak)
    whole = next(each for each in found if each.kind == "compiled")
    others = [each for each in found if each.kind in ("budget", "planned")]
    copies = [_verdict(whole, each, 1.0) for each in found if each.kind == "copy"]
    noise = max([NOISE, *(abs(each.ratio - 1) for each in copies)])
    pairs = [(whole, ours[-1] if ours else None, 1 + WITHIN)]
    for other in others:
        most = other.peak if other.limit is None else other.limit
        inside = [each for each in ours if each.peak <= most]
        inside = [each for each in inside if each.limit == most] or inside
        pairs.append((other, inside[-1] if inside else None, 1.0))
    return [*copies, *(_verdict(*pair, noise) for pair in pairs)]


def _verdict(other: Timed, ours: Timed | None, allowed: float, noise: float = NOISE) -> Verdict:
    if ours is None:
        return Verdict(other, None, allowed)
    ratios = [mine / theirs for mine, theirs in zip(ours.seconds, other.seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Verdict(other, ours, allowed, middle, low, high, noise)


def as_rows(model: str, found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """The same for a file."""
    return [
        {
            "model": model,
            "beside": each.other.name,
            "peak_bytes": each.other.peak,
            "allowed": each.allowed,
            "way": None if each.ours is None else each.ours.name,
            "way_peak_bytes": None if each.ours is None else each.ours.peak,
            "ratio": each.ratio,
            "quartiles": [each.low, each.high],
            "holds": each.word,
        }
        for each in found
    ]


def verdict_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of the rows of a file."""
    lines = [
        "| model | beside | its peak | planned and compiled | time to that | allowed | holds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["quartiles"]
        ours = f"{format_bytes(row['way_peak_bytes'] or 0)} | ×{row['ratio']:.3f} ({low:.2f}–{high:.2f})"
        lines.append(
            f"| {row['model']} | {row['beside']} | {format_bytes(row['peak_bytes'])} | "
            f"{'– | –' if row['way'] is None else ours} | ×{row['allowed']:.2f} | {row['holds']} |"
        )
    return "\n".join(lines)
