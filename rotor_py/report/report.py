"""The report of a plan, with its HTML page, and the curve of time against memory."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.metadata import version
from pathlib import Path

import torch

from rotor_py.report import curve_pictures as curve
from rotor_py.report import step_pictures as schedule
from rotor_py.report.curve_pictures import PHONE, SCREEN
from rotor_py.report.numbers import HEADINGS, ReportFacts, stage_rows
from rotor_py.report.sweep import Point, Sweep, saving
from rotor_solver import Persistent, Sequence, frontier, store_all
from rotor_solver.watching import watcher

_NONE: Mapping[str, Sequence] = {}
# Number of limits solved one by one for plans with offload. A guess: fewer make a coarser curve, more a longer wait.
_LIMITS = 12
# Share of the range of limits at which the search for an overhead's least limit ends. A guess: more wastes memory.
_CLOSE = 0.005


def sweep_of(
    facts: ReportFacts, slots: int = 500, strategies: Mapping[str, Sequence] = _NONE, overhead: float | None = None
) -> Sweep:
    """Compute the curve of time against memory for the step of `facts`; `strategies`, by name, are further points.

    `slots` is the least number of units into which the solver divides memory. `frontier` does not offload, so plans
    with offload are solved for some limits one by one; with `overhead` (0.1: 10 %), a search finds its least limit.
    """
    # `frontier` rounds bytes to slots, so it may miss storing everything and the plan of this report: add both.
    found = [*frontier(facts.chain, slots=slots).sequences, store_all(facts.chain), facts.sequence]
    if facts.budget.link is not None and facts.budget.forwards == 1:
        found += _one_by_one(facts, slots, found, overhead)
    points: list[Point] = []
    # Drop plans with more memory but no less time: `frontier` finds some, as it ignores snapshots of random state.
    for point in sorted((_point(facts, "", each) for each in found), key=lambda p: (p.mem_limit, p.step_seconds)):
        if not points or point.step_seconds < points[-1].step_seconds:
            points.append(point)
    return Sweep(
        fixed_bytes=facts.budget.fixed.total,
        store_all_bytes=facts.store_all_bytes,
        points=tuple(points),
        strategies=tuple(_point(facts, name, sequence) for name, sequence in strategies.items()),
    )


def _one_by_one(
    facts: ReportFacts, slots: int, others: Iterable[Sequence], overhead: float | None
) -> Iterator[Sequence]:
    """Yield plans with offload for some limits; given an `overhead`, also for those tried to find its least limit."""
    budget, progress = facts.budget, watcher()
    least, most = budget.least_bytes(), facts.store_all_bytes
    solver, known = Persistent(slots), dict[int, Sequence]()
    for number in range(_LIMITS):
        if progress is not None:
            progress(number, _LIMITS, "limits with offload")
        limit = least + number**2 * (most - least) // _LIMITS**2  # denser at small limits, where overheads are large
        known[limit] = budget.solve(limit, solver)
        yield known[limit]
    if overhead is None:
        return

    def fast(sequence: Sequence) -> bool:
        return facts.seconds_of(sequence) <= (1 + overhead) * facts.store_all_seconds

    # If the best plan of a limit is too slow, so are those of smaller limits. A slow plan of `others` shows nothing
    # about its limit: with offload, there may be a faster one.
    enough = min((budget.peak_bytes(each) for each in (*known.values(), *others) if fast(each)), default=most)
    short = max((limit for limit, each in known.items() if limit < enough and not fast(each)), default=least)
    while enough - short > _CLOSE * (most - least):
        middle = (short + enough) // 2
        sequence = budget.solve(middle, solver)
        yield sequence
        if fast(sequence):
            enough = min(middle, budget.peak_bytes(sequence))
        else:
            short = middle


def _point(facts: ReportFacts, name: str, sequence: Sequence) -> Point:
    peak, seconds = facts.budget.peak_bytes(sequence), facts.seconds_of(sequence)
    return Point(name, peak, seconds, facts.overhead_of(sequence), sequence)


def _origin(device: str, made: datetime) -> str:
    """Say when and where a page was made; `device` is torch's name, such as "cuda:0", or that of a simulated device."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):  # simulated
        device = f"{device}, predicted"
    elif torch.device(device).type == "cpu":
        device = f"{device} ({platform.machine()}, threads: {torch.get_num_threads()})"
    elif torch.cuda.is_available():
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    versions = f"rotor_py {version('rotor-plan')}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"Made on {made:%Y-%m-%d at %H:%M %Z} with {versions}, for {device}."


def page(
    facts: ReportFacts, sweep: Sweep, remarks: tuple[str, ...] = (), usage: str = "", made: datetime | None = None
) -> str:
    """Return the HTML page as text; `remarks`, `usage` and `made` as for `Report.to_html`."""
    # Imported on use: most programs make no page.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rotor_py.report"),
        autoescape=True,  # names of modules may contain HTML
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    begin, rest = facts.verdict()
    return environment.get_template("report.html").render(
        fits=facts.fits,
        begin=begin,
        rest=rest,
        remarks=(*facts.remarks(), *remarks),
        amounts=facts.amounts(),
        parts=facts.budget.fixed.in_words() or "nothing",
        **_pictures(facts, sweep, SCREEN, math.inf),
        phone=_pictures(facts, sweep, PHONE, PHONE),
        axes=curve,
        cell=schedule,
        saving=saving(sweep),
        headings=("#", "stage", *HEADINGS, "what happens"),
        stages=list(stage_rows(facts)),
        usage=usage,
        origin=_origin(facts.device, datetime.now(timezone.utc) if made is None else made),
        sequences=[("" if name == "sequence" else name, str(each)) for name, each in facts.by_forwards().items()],
    )


def _pictures(facts: ReportFacts, sweep: Sweep, room: float, most: float) -> dict[str, object]:
    """Return the pictures by name, `room` pixels wide; those with a column per operation or stage up to `most`."""
    return {
        "curve": curve.curve_picture(facts, sweep, room),
        "batch": None if facts.batches is None else curve.batch_picture(facts.batches, room),
        "memory": schedule.memory_picture(facts, room, most),
        "schedule": schedule.schedule_picture(facts, most),
    }


@dataclass(frozen=True, slots=True)
class Report(ReportFacts):
    """A measured model, its budget and its plan. `mem_limit` is the limit in bytes, or None if no limit was set.

    `str(report)` is the text for a terminal; a notebook shows the page that `to_html` writes. The properties of
    `ReportFacts` are the numbers, in bytes and seconds.
    """

    def __str__(self) -> str:
        # Imported on use: rich takes long, and most programs print no report.
        from rotor_py.report.terminal import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        # In an iframe, the page's styles and scripts do not affect the notebook.
        source = escape(page(self, self._swept()), quote=True)
        return f'<iframe srcdoc="{source}" title="plan" style="width: 100%; height: 720px; border: 0"></iframe>'

    def to_html(
        self,
        path: str | os.PathLike[str],
        remarks: tuple[str, ...] = (),
        *,
        usage: str = "",
        made: datetime | None = None,
    ) -> None:
        """Write one self-contained page: no external script, style, font or image.

        Args:
            path: file to write. Raises OSError if that fails.
            remarks: sentences to add below those about the plan.
            usage: Python lines that train by the plan, to print on the page.
            made: date on the page, now by default.
        """
        Path(path).write_text(page(self, self._swept(), remarks, usage, made), encoding="utf-8")

    def _swept(self) -> Sweep:
        """Return the curve of time against memory, which only pages show; solve it now if this has not been done."""
        return sweep_of(self) if self.sweep is None else self.sweep
