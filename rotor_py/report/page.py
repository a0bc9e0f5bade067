"""The report as one page that loads nothing."""

from __future__ import annotations

from html import escape

from rotor_py.report import curve_picture as curve
from rotor_py.report import schedule_picture as schedule
from rotor_py.report.memory_picture import LEFT, memory_picture
from rotor_py.report.report import Report
from rotor_py.report.sweep import sweep
from rotor_py.report.wording import saving
from rotor_py.units import format_bytes, format_seconds


def page(report: Report, remarks: tuple[str, ...] = ()) -> str:
    """The page as text; `remarks` are lines under the verdict."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rotor_py.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    begin, rest = report.verdict()
    swept = sweep(report) if report.sweep is None else report.sweep
    reason = report.peak_reason()
    return environment.get_template("report.html").render(
        title=report.title,
        fits=report.fits,
        begin=begin,
        rest=rest,
        remarks=remarks if reason is None else (reason, *remarks),
        amounts=_amounts(report),
        parts=report.budget.parts() or "nothing",
        curve=curve.curve_picture(report, swept),
        axes=curve,
        saving=saving(swept),
        memory=memory_picture(report),
        left=LEFT,
        schedule=schedule.schedule_picture(report),
        cell=schedule,
        stages=_stages(report),
        sequence=str(report.sequence),
    )


def frame(report: Report) -> str:
    """The page for a notebook, whose own page its styles and scripts do not touch."""
    text = escape(page(report), quote=True)
    return f'<iframe srcdoc="{text}" title="plan" style="width: 100%; height: 720px; border: 0"></iframe>'


def _amounts(report: Report) -> list[tuple[str, str]]:
    limit = "none" if report.mem_limit is None else format_bytes(report.mem_limit)
    found = [
        ("limit", limit),
        ("planned peak", format_bytes(report.peak_bytes)),
        ("fixed part", format_bytes(report.budget.fixed.total)),
        ("least possible", format_bytes(report.budget.least_bytes())),
        ("storing everything", format_bytes(report.store_all_bytes)),
        ("planned step", format_seconds(report.step_seconds)),
        ("plain step", format_seconds(report.store_all_seconds)),
        ("overhead", f"{report.overhead - 1:+.1%}"),
    ]
    gap = report.gap
    return found if gap is None else [*found, ("from the optimum", "0 %" if gap < 5e-5 else f"at most {gap:.2%}")]


def _stages(report: Report) -> list[tuple[str, list[tuple[float, str]], str]]:
    """Per stage: its name, (number to sort by, text) per column, and what happens to it."""
    rows = []
    for name, cost, action in zip(report.measurement.names, report.measurement.stages, report.actions(), strict=True):
        scratch = max(cost.forward_temp_bytes, cost.backward_temp_bytes, cost.nograd_temp_bytes)
        times = [(seconds, format_seconds(seconds)) for seconds in (cost.forward_seconds, cost.backward_seconds)]
        sizes = [(float(size), format_bytes(size)) for size in (cost.activation_bytes, cost.saved_bytes, scratch)]
        rows.append((name, times + sizes, action))
    return rows
