"""Memory against time as a picture, against the sweep and the solver."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rotor_py import Report
from rotor_py.report.curve_pictures import HEIGHT, LEFT, PHONE, RIGHT, TOP, WIDTH, curve_picture, round_numbers
from rotor_py.report.page import page
from rotor_py.report.report import sweep_of
from rotor_py.report.sweep import Point, Sweep, saving
from rotor_solver import Sequence

NONE = Sequence([])
STEPS = tuple(Point("", size, 1e-3 * more, more, NONE) for size, more in ((400, 8.0), (600, 2.0), (1000, 1.0)))


def corners(line: str) -> list[tuple[float, float]]:
    """Where the line begins every step: the place of each limit, and the height of what it costs."""
    start, top, first = re.match(r"M([\d.]+) (\d+)V([\d.]+)", line).groups()
    assert float(top) == TOP
    return [(float(start), float(first)), *((float(x), float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", line))]


def test_the_line_has_a_corner_for_every_limit_and_time_is_logarithmic(report: Report) -> None:
    size = report.peak_bytes
    steps = tuple(replace(point, mem_limit=point.mem_limit * size // 600) for point in STEPS)
    strategies = (Point("a", size, 3e-3, 3.0, NONE), Point("b", size, 1.0, 1000.0, NONE))
    picture = curve_picture(replace(report, mem_limit=None), Sweep(0, size, steps, strategies))
    assert picture.limit_x is None
    (x0, y0), (x1, y1), (x2, y2) = corners(picture.line)
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1 / 3, abs=0.01)
    bottom = TOP + HEIGHT
    assert y2 == bottom
    assert (bottom - y0) / (bottom - y1) == pytest.approx(math.log(8) / math.log(2), abs=0.1)
    assert [mark.letter for mark in picture.marks] == ["A"], "what is far above the curve is not drawn"
    assert [text.endswith("(outside the picture)") for _, text in picture.legend] == [False, True]


def test_the_plan_lies_on_the_curve_whose_columns_fill_the_width(report: Report) -> None:
    found = sweep_of(report)
    picture = curve_picture(report, found)
    assert 0 <= picture.limit_x - picture.plan.x < WIDTH / 4
    steps = corners(picture.line)
    height = next(y for x, y in reversed(steps) if x <= picture.plan.x + 0.1)
    assert picture.plan.y == pytest.approx(height, abs=2), "a plan for one limit is as fast as the curve"
    assert len(steps) == len(found.points)
    end = float(LEFT)
    for column in picture.columns:
        assert column.x == pytest.approx(end)
        end = column.x + column.width
    assert end == pytest.approx(LEFT + WIDTH)
    assert picture.columns[0].title.startswith("no plan needs less than ")
    assert all(re.search(r"limit .*: peak .* a step, \+.* time, ", column.title) for column in picture.columns[1:])


def test_a_page_finds_out_the_curve_by_itself_or_shows_what_is_known(report: Report, tmp_path: Path) -> None:
    def written(report: Report) -> str:
        report.to_html(tmp_path / "plan.html")
        return (tmp_path / "plan.html").read_text(encoding="utf-8")

    text = written(report)
    assert '<svg id="curve"' in text
    assert saving(sweep_of(report)) in text
    known = Sweep(0, 2 * report.peak_bytes, (*STEPS[:2], replace(STEPS[2], mem_limit=2 * report.peak_bytes)))
    assert saving(known) in written(replace(report, sweep=known))
    text = page(report, Sweep(0, 1000, STEPS[2:]))
    assert "No plan needs less than storing everything: 1.00 kB." in text
    assert 'id="curve"' not in text


def test_a_phone_has_the_same_curve_in_less_room_with_fewer_sizes(report: Report) -> None:
    swept = sweep_of(report)
    wide, phone = curve_picture(report, swept), curve_picture(report, swept, PHONE)
    assert LEFT + phone.width + RIGHT == PHONE
    assert [column.title for column in phone.columns] == [column.title for column in wide.columns]
    assert 2 <= len(phone.sizes) < len(wide.sizes)
    assert all(LEFT <= x <= LEFT + phone.width for x, _ in corners(phone.line))


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (7.2, 9.1, [7.5, 8, 8.5, 9]), (3, 3, [3]), (0, 1e9, [k * 2e8 for k in range(6)])],
)
def test_numbers_on_an_axis_are_round(low: float, high: float, numbers: list[float]) -> None:
    assert round_numbers(low, high, 6) == pytest.approx(numbers)


def test_letters_stand_apart_and_beside_the_plan_and_its_limit(report: Report) -> None:
    plan = Point("twin", report.peak_bytes, report.step_seconds, report.overhead, report.sequence)
    picture = curve_picture(report, replace(sweep_of(report), strategies=(plan,) * 6))
    places = [(picture.plan.x, picture.plan.y), *((mark.letter_x, mark.letter_y) for mark in picture.marks)]
    assert len(places) == 7
    for at, (x, y) in enumerate(places):
        assert at == 0 or abs(x - picture.limit_x) >= 8
        assert all(abs(x - a) >= 10 or abs(y - b) >= 13 for a, b in places[:at])
