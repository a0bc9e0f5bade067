"""From facts to what was asked for: files, and the report on the screen."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rotor_cli.facts import Facts
from rotor_cli.reporters.batch_chart import BatchChart
from rotor_cli.reporters.comparison import Comparison
from rotor_cli.reporters.json_report import json_report
from rotor_cli.reporters.sweep import curve, plot
from rotor_cli.reporters.text import console, render, usage_lines, verified
from rotor_cli.reporters.trace import trace
from rotor_cli.request import Request


def deliver(facts: Facts, request: Request) -> None:
    """Write the files that are asked for, and print the report; OSError if a file cannot be written."""
    write(facts, request)
    show(facts, request)


def write(facts: Facts, request: Request) -> None:
    """Write trace, page, plot and JSON, each where a file is named; OSError if one cannot be written."""
    if request.trace_file is not None:
        Path(request.trace_file).write_text(json.dumps(trace(facts)) + "\n", encoding="utf-8")
    if request.html_file is not None:
        remarks = (verified(facts).plain,) if facts.verified is not None else ()
        usage = usage_lines(facts, request.plan_file) if facts.limited else ""  # without a limit, nothing is planned
        facts.to_html(request.html_file, remarks, usage=usage)
    if request.plot_file is not None and facts.sweep is not None:
        plot(facts.sweep, request.plot_file, facts.title)
    if request.json_file not in (None, "-"):
        Path(str(request.json_file)).write_text(_json(facts) + "\n", encoding="utf-8")


def show(facts: Facts, request: Request) -> None:
    """Print the report, as text or, with `--json -`, as JSON and nothing else."""
    if request.json_file == "-":
        click.echo(_json(facts))
        return
    out = console()
    if facts.limited:
        out.print(render(facts, saved_plan=request.plan_file))
    if facts.batches is not None:
        out.print("", BatchChart(facts.batches), sep="\n")
    if facts.compared:
        out.print("", Comparison(facts.compared), sep="\n")
    if request.sweep and facts.sweep is not None:
        out.print(*([""] if facts.limited else []), curve(facts.sweep, facts.title, request.overhead), sep="\n")


def _json(facts: Facts) -> str:
    return json.dumps(json_report(facts), indent=1)
