"""`Checkpointable.report()`: in a terminal, in a notebook, and as a page: self-contained, complete and escaped."""

import html
import itertools
import platform
import re
from collections.abc import Hashable
from dataclasses import replace
from datetime import datetime, timezone, tzinfo
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import rotor_py
from rotor_profiling.stage.seconds import StageRun
from rotor_py import Checkpointable, Report, format_bytes
from rotor_py.measure.rounds import StageTimes
from rotor_py.report.numbers import NOISY, WORDS
from rotor_py.report.report import page, sweep_of
from rotor_py.report.sweep import format_share
from tests.report.conftest import EVIL

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Elements(HTMLParser):
    """Every element with its attributes and text; an element that is closed wrongly is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return page(report, sweep_of(report), remarks=("measured <peak>",))


@pytest.fixture(scope="module")
def elements(text: str) -> Elements:
    return Elements(text)


def test_nothing_comes_from_elsewhere_names_are_escaped_and_all_that_is_known_is_there(text, elements, report) -> None:
    assert sum(tag == "script" for tag, _ in elements.found) == 1
    assert EVIL not in text
    assert any(EVIL in cell for cell in elements.texts["td"])
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"link", "img", "iframe", "object", "embed", "image", "use", "base", "video", "audio", "source"}
    assert not {name for _, attributes in elements.found for name in attributes} & {"src", "href", "srcset", "action"}
    for loads in ("://", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert loads not in text
    policy = next(attributes for tag, attributes in elements.found if attributes.get("http-equiv"))
    assert str(policy["content"]).startswith("default-src 'none';")
    # The verdict, remarks, stages and operations.
    begin, rest = report.verdict()
    assert elements.texts["b"][0] == begin
    assert elements.texts["h1"] == [rest]
    assert elements.texts["p"][0] == "measured <peak>"
    cells = elements.texts["td"]
    assert cells[1::8] == list(report.measurement.names)
    assert cells[7::8] == report.actions()
    titles = elements.texts["title"]
    for operation in map(str, report.sequence):
        assert sum(title.startswith(f"{operation} ") for title in titles) >= 2
    assert set(report.measurement.names) <= set(titles)
    assert elements.texts["code"] == [str(report.sequence)]
    values = [attributes.get("data-value") for tag, attributes in elements.found if tag == "td"]
    costs = report.measurement.stages  # numbers sort as numbers
    assert [float(str(value)) for value in values[5::8]] == [cost.saved_bytes for cost in costs]
    assert [float(str(value)) for value in values[2::8]] == [cost.forward_seconds for cost in costs]


def test_the_page_says_how_to_use_it_and_where_it_comes_from(report: Report) -> None:
    made = datetime(2031, 2, 3, 4, 5, tzinfo=timezone.utc)
    known = sweep_of(report)
    text = page(report, known, usage='model = Checkpointable(model, "<2>")', made=made)
    assert "model = Checkpointable(model, &#34;&lt;2&gt;&#34;)" in text
    end = Elements(text).texts["footer"][0]
    assert end.startswith("Made on 2031-02-03 at 04:05 UTC with ")
    for part in (rotor_py.__version__, f"torch {torch.__version__}", platform.python_version(), "for cpu ("):
        assert part in end
    assert "Use it" not in page(report, known)
    assert f"Made on {datetime.now(timezone.utc):%Y-}" in page(report, known)


def test_colours_used_are_defined_for_light_and_dark_and_can_be_told_from_their_ground(text, mixed, report) -> None:
    whole = page(mixed, sweep_of(report))
    for written in (text, whole):
        light, _, dark = written.partition("@media (prefers-color-scheme: dark)")
        used = set(re.findall(r"var\((--\w+)\)", written))
        for style in (light, dark.partition("}\n}")[0]):
            colours = dict(re.findall(r"(--\w+): (#\w+)", style))
            assert used <= set(re.findall(r"(--\w+):", style))
            for kind in ("part", "packed", "rounded", "elsewhere", "out", "returned"):
                assert contrast(colours[f"--{kind}"], colours["--panel"]) >= 3, kind
            assert len({colours[f"--{kind}"] for kind in WORDS}) == len(WORDS)


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(brightness, (one, other)))
    return (high + 0.05) / (low + 0.05)


def brightness(colour: str) -> float:
    values = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_text_begins_with_the_verdict_and_names_every_stage(model: Checkpointable, report: Report) -> None:
    text = str(report)
    assert report.peak_bytes == model.budget.peak_bytes(model.sequence)
    limit, peak = format_bytes(model.mem_limit), format_bytes(report.peak_bytes)
    assert " ".join(text.split()).startswith(f"Sequential fits in {limit} on cpu: predicted peak {peak}")
    assert all(name in text for name in model.names)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    over = replace(report, mem_limit=report.peak_bytes - 1)
    assert (report.fits, over.fits, replace(report, mem_limit=report.peak_bytes).fits) == (True, False, True)
    assert str(over).startswith("Sequential does not fit in")


@pytest.mark.timed
@pytest.mark.parametrize(("factor", "noisy"), [(1.02, False), (1.8, True)])
def test_a_noisy_machine_is_told_of(factor: float, noisy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    add, seconds = StageTimes.add, itertools.cycle((1, factor))

    def add_other(times: StageTimes, kind: Hashable, run: StageRun, **more: bool) -> None:
        now = next(seconds)
        add(times, kind, StageRun(((now, now),) * len(run.ways), run.node and (now, 2 * now)), **more)

    monkeypatch.setattr(StageTimes, "add", add_other)
    report = Checkpointable(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), "1GB", cache=False).report()
    shown = [" ".join(each.split()) for each in (str(report), html.unescape(report._repr_html_()))]
    assert all(("times vary by" in each) == noisy for each in shown)
    assert (report.measurement.spread >= NOISY) == noisy
    assert not noisy or f"times vary by {format_share(report.measurement.spread)}" in shown[0]


def test_a_notebook_shows_the_page_that_is_written_to_a_file(report, tmp_path, monkeypatch) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime(2026, 1, 2, tzinfo=tz)

    monkeypatch.setattr("rotor_py.report.report.datetime", Stopped)
    report.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    shown = report._repr_html_()
    assert shown.startswith("<iframe ")
    assert shown.count("<") == 2
    assert html.unescape(shown.partition('srcdoc="')[2].partition('"')[0]) == page
