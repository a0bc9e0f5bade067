"""The page: well formed, self-contained, complete and escaped."""

from __future__ import annotations

import platform
import re
from datetime import datetime, timezone
from html.parser import HTMLParser

import pytest
import torch

import rotor_py
from rotor_py import Report
from rotor_py.report.numbers import WORDS
from rotor_py.report.page import page
from rotor_py.report.report import sweep_of
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

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

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


def test_nothing_is_loaded_from_elsewhere(text: str, elements: Elements) -> None:
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"link", "img", "iframe", "object", "embed", "image", "use", "base", "video", "audio", "source"}
    assert not {name for _, attributes in elements.found for name in attributes} & {"src", "href", "srcset", "action"}
    for loads in ("://", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert loads not in text
    policy = next(attributes for tag, attributes in elements.found if attributes.get("http-equiv"))
    assert str(policy["content"]).startswith("default-src 'none';")


def test_verdict_remarks_stages_and_operations_are_there(report: Report, elements: Elements) -> None:
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


def test_names_are_escaped(text: str, elements: Elements) -> None:
    assert sum(tag == "script" for tag, _ in elements.found) == 1
    assert EVIL not in text
    assert any(EVIL in cell for cell in elements.texts["td"])


def test_wide_things_scroll_in_their_own_box_and_colours_follow_the_reader(text: str) -> None:
    boxes = text.split('<div class="box"')[1:]
    assert len(boxes) == 4
    for box, inside in zip(boxes, ("<svg", "<svg", "<svg", "<table"), strict=True):
        found = box.partition("</div>")[0]
        assert found.count(inside) == (2 if inside == "<svg" else 1), "a picture is there for a screen and for a phone"
    assert text.count("<svg") == 6
    assert re.search(r"\.box \{ overflow: auto;", text)
    assert "@media (prefers-color-scheme: dark)" in text
    assert 'name="viewport" content="width=device-width' in text


def test_colours_used_are_defined_for_light_and_dark_and_can_be_told_from_their_ground(
    text: str, mixed: Report, report: Report
) -> None:
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
