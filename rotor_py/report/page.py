"""Render the report as one self-contained HTML page."""

from __future__ import annotations

import math
import platform
import re
from datetime import datetime, timezone
from html import escape
from importlib.metadata import version

import torch

from rotor_py.report import curve_pictures as curve
from rotor_py.report import step_pictures as schedule
from rotor_py.report.curve_pictures import PHONE, SCREEN
from rotor_py.report.numbers import HEADINGS, ReportFacts, stage_rows
from rotor_py.report.step_pictures import LEFT, memory_picture
from rotor_py.report.sweep import Sweep, saving
from rotor_py.units import format_bytes, format_seconds


def _origin(device: str, made: datetime) -> str:
    """Environment to know before comparing two pages; `device` as torch names it: "cuda:0"."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):  # a simulated device, with its own name
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
    """The page as text.

    Args:
        remarks: lines under the verdict.
        usage: Python that follows the plan.
        made: date of the page, now by default.
    """
    # Import on use: most training never makes a page.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rotor_py.report"),
        autoescape=True,  # module names are user input
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    begin, rest = facts.verdict()
    return environment.get_template("report.html").render(
        title=facts.title,
        fits=facts.fits,
        begin=begin,
        rest=rest,
        remarks=(*facts.remarks(), *remarks),
        amounts=_amounts(facts),
        parts=facts.budget.fixed.in_words() or "nothing",
        **_pictures(facts, sweep, SCREEN, math.inf),
        phone=_pictures(facts, sweep, PHONE, PHONE),
        axes=curve,
        plane=curve,
        saving=saving(sweep),
        left=LEFT,
        cell=schedule,
        headings=("#", "stage", *HEADINGS, "what happens"),
        stages=[
            (
                row.name,
                [
                    *((each, format_seconds(each)) for each in row.seconds),
                    *((each, format_bytes(each)) for each in row.bytes),
                ],
                row.kind,
                row.action,
            )
            for row in stage_rows(facts)
        ],
        usage=usage,
        origin=_origin(facts.device, datetime.now(timezone.utc) if made is None else made),
        sequences=[("" if name == "sequence" else name, str(each)) for name, each in facts.by_forwards().items()],
    )


def frame(text: str) -> str:
    """Wrap a page in a frame, so that its styles and scripts leave the notebook alone."""
    source = escape(text, quote=True)
    return f'<iframe srcdoc="{source}" title="plan" style="width: 100%; height: 720px; border: 0"></iframe>'


def _pictures(facts: ReportFacts, sweep: Sweep, room: float, most: float) -> dict[str, object]:
    """Draw in `room` pixels; pictures with a column per operation or stage may grow to `most`."""
    return {
        "curve": curve.curve_picture(facts, sweep, room),
        "batch": None if facts.batches is None else curve.batch_picture(facts.batches, room),
        "memory": memory_picture(facts, room, most),
        "schedule": schedule.schedule_picture(facts, most),
    }


def _amounts(facts: ReportFacts) -> list[tuple[str, str]]:
    found = [
        ("limit", "none" if facts.mem_limit is None else format_bytes(facts.mem_limit)),
        ("planned peak", format_bytes(facts.peak_bytes)),
        *facts.followed_step(),
        ("fixed part", format_bytes(facts.budget.fixed.total)),
        ("least possible", format_bytes(facts.budget.least_bytes())),
        ("storing everything", format_bytes(facts.store_all_bytes)),
    ]
    overhead = ("overhead", f"{facts.overhead - 1:+.1%}")
    names = {"planned": "planned step", "store-all": "plain step"}
    times = [(names.get(name, name), said) for name, said in facts.times()]
    # If seconds are assumptions, the reliable numbers come first.
    found += [overhead, *times] if facts.basis else [*times, overhead]
    return [*found, *facts.quality()]
