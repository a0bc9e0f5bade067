"""`Checkpointable.report()`: in a terminal, in a notebook, and as a file."""

from __future__ import annotations

import html
import itertools
from collections.abc import Hashable
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_profiling.stage.seconds import StageRun
from rotor_py import Checkpointable, Report, format_bytes, store_all
from rotor_py.measure.rounds import StageTimes
from rotor_py.report.numbers import NOISY
from rotor_py.report.sweep import format_share
from tests.fields import raises


def test_the_text_begins_with_the_verdict_and_names_every_stage(model: Checkpointable, report: Report) -> None:
    text = str(report)
    assert report.peak_bytes == model.budget.peak_bytes(model.sequence)
    assert " ".join(text.split()).startswith(
        f"Sequential fits in {format_bytes(model.mem_limit)} on cpu: predicted peak {format_bytes(report.peak_bytes)}"
    )
    assert all(name in text for name in model.names)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    over = replace(report, mem_limit=report.peak_bytes - 1)
    assert (report.fits, over.fits, replace(report, mem_limit=report.peak_bytes).fits) == (True, False, True)
    assert str(over).startswith("Sequential does not fit in")


def test_a_strategy_by_hand_is_reported_without_a_limit() -> None:
    model = Checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(8, 4), every_n_layers=0)
    report = model.report()
    assert report.mem_limit is None
    assert report.sequence == store_all(report.chain)
    assert str(report).startswith("Sequential is planned without a limit on cpu")
    with raises(ValueError, "not_measured"):
        Checkpointable(nn.Sequential(nn.Linear(4, 4))).report()


@pytest.mark.timed
@pytest.mark.parametrize(("factors", "noisy"), [((1, 1.02), False), ((1, 1.8), True)], ids=["quiet", "noisy"])
def test_a_noisy_machine_is_told_of(factors: tuple[float, float], noisy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    add, seconds = StageTimes.add, itertools.cycle(factors)

    def add_other(times: StageTimes, kind: Hashable, run: StageRun, **more: bool) -> None:
        now = next(seconds)
        add(times, kind, StageRun(((now, now),) * len(run.ways), run.node and (now, 2 * now)), **more)

    monkeypatch.setattr(StageTimes, "add", add_other)
    model = Checkpointable(nn.Sequential(nn.Linear(4, 4)), mem_limit="1GB", cache=False)
    model.measure(torch.randn(8, 4))
    model.compute_sequence()
    report = model.report()
    shown = [" ".join(each.split()) for each in (str(report), html.unescape(report._repr_html_()))]
    assert all(("times vary by" in each) == noisy for each in shown)
    assert (report.measurement.spread >= NOISY) == noisy
    assert not noisy or f"times vary by {format_share(report.measurement.spread)}" in shown[0]


def test_a_notebook_shows_the_page_that_is_written_to_a_file(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime(2026, 1, 2, tzinfo=tz)

    monkeypatch.setattr("rotor_py.report.page.datetime", Stopped)
    report.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    shown = report._repr_html_()
    assert shown.startswith("<iframe ")
    assert shown.count("<") == 2
    assert html.unescape(shown.partition('srcdoc="')[2].partition('"')[0]) == page
