"""Memory against time, and samples a second over the batch, as pictures."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from rotor_py import Report
from rotor_py.report import curve_pictures
from rotor_py.report.curve_pictures import HEIGHT, LEFT, PHONE, RIGHT, SCREEN, TOP, batch_picture, curve_picture
from rotor_py.report.report import page, sweep_of
from rotor_py.report.sweep import BatchChoice, BatchPoint, Point, Sweep, format_rate, saving
from rotor_solver import Sequence

NONE, WIDTH = Sequence([]), SCREEN - LEFT - RIGHT
STEPS = tuple(Point("", size, 1e-3 * more, more, NONE) for size, more in ((400, 8.0), (600, 2.0), (1000, 1.0)))


def corners(line: str) -> list[tuple[float, float]]:
    """Where the line begins every step: the place of each limit, and the height of what it costs."""
    start, top, first = re.match(r"M([\d.]+) (\d+)V([\d.]+)", line).groups()
    assert float(top) == TOP
    return [(float(start), float(first)), *((float(x), float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", line))]


def test_the_line_has_a_corner_for_every_limit_time_is_logarithmic_and_an_axis_has_round_numbers(report) -> None:
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
    for low, high, numbers in ((0, 10, [0, 2, 4, 6, 8, 10]), (7.2, 9.1, [7.5, 8, 8.5, 9]), (3, 3, [3])):
        assert curve_pictures.round_numbers(low, high, 6) == pytest.approx(numbers)


def test_the_plan_lies_on_the_curve_which_fills_screen_and_phone_and_letters_stand_apart(report: Report) -> None:
    found = sweep_of(report)
    picture = curve_picture(report, found)
    assert 0 <= picture.limit_x - picture.plan.x < WIDTH / 4
    steps = corners(picture.line)
    height = next(y for x, y in reversed(steps) if x <= picture.plan.x + 0.1)
    assert picture.plan.y == pytest.approx(height, abs=2), "a plan for one limit is as fast as the curve"
    assert len(steps) == len(found.points)
    ends = [LEFT, *(column.x + column.width for column in picture.columns)]
    assert [*(column.x for column in picture.columns), LEFT + WIDTH] == pytest.approx(ends)
    assert picture.columns[0].title.startswith("no plan needs less than ")
    assert all(re.search(r"limit .*: peak .* a step, \+.* time, ", column.title) for column in picture.columns[1:])
    phone = curve_picture(report, found, PHONE)
    assert LEFT + phone.width + RIGHT == PHONE
    assert [column.title for column in phone.columns] == [column.title for column in picture.columns]
    assert 2 <= len(phone.sizes) < len(picture.sizes)
    assert all(LEFT <= x <= LEFT + phone.width for x, _ in corners(phone.line))
    plan = Point("twin", report.peak_bytes, report.step_seconds, report.overhead, report.sequence)
    picture = curve_picture(report, replace(found, strategies=(plan,) * 6))
    places = [(picture.plan.x, picture.plan.y), *((mark.letter_x, mark.letter_y) for mark in picture.marks)]
    assert len(places) == 7
    for at, (x, y) in enumerate(places):
        assert at == 0 or abs(x - picture.limit_x) >= 8
        assert all(abs(x - a) >= 10 or abs(y - b) >= 13 for a, b in places[:at])


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


STORED = (BatchPoint(2, 10.0, 10.0, True), BatchPoint(4, 16.0, 16.0, True))
POINTS = (*STORED, BatchPoint(8, 22.0, None, False), BatchPoint(32, 30.0, None, True))
CHOICE = BatchChoice(
    aim="best", batch=32, mem_limit=10**6, step_seconds=1.0, optimizer_seconds=0.1, overhead=1.4,
    samples_per_second=30.0, largest=32, largest_stored=4, points=POINTS, gap=0.003, beyond=33, beyond_bytes=1_012_000,
    measured_peak_bytes=990_000, measured_per_second=((4, 15.0), (32, 29.0)),
)  # fmt: skip


def test_points_are_at_the_logarithm_of_their_batch_and_higher_where_more_samples_are_trained() -> None:
    picture = batch_picture(CHOICE)
    xs = [mark.x for mark in picture.measured]
    assert xs == pytest.approx([LEFT, LEFT + WIDTH / 4, LEFT + WIDTH])
    heights = [mark.y for mark in picture.measured]
    assert heights == sorted(heights, reverse=True)
    assert (picture.chosen.x, picture.chosen.y) == (xs[-1], heights[-1])
    assert all(TOP <= mark.y <= TOP + HEIGHT for mark in picture.measured)
    assert (picture.line.count("L"), picture.stored.count("L")) == (3, 1)
    assert [text for _, text in picture.batches] == ["2", "4", "8", "32"]
    assert sum(column.width for column in picture.columns) == pytest.approx(WIDTH)
    said = [column.title for column in picture.columns]
    assert said[0] == "batch 2: 10.0 samples a second, storing everything 10.0"
    assert said[2] == "batch 8: 22.0 samples a second, storing everything does not fit (predicted)"
    assert batch_picture(replace(CHOICE, points=POINTS[-1:])) is None
    # A phone has the numbers of fewer batches, and always the largest.
    points = tuple(BatchPoint(2**at, 10.0 + at, None, True) for at in range(13))
    many = replace(CHOICE, batch=4096, points=points)
    wide, phone = batch_picture(many), batch_picture(many, PHONE)
    assert len(wide.batches) == 13
    assert phone.batches[-1][1] == "4096"
    assert len(phone.batches) > 3
    assert all(after - before >= 32 for (before, _), (after, _) in pairwise(phone.batches))


def test_a_page_has_the_picture_and_the_sentences_if_the_batch_was_chosen(report: Report, tmp_path) -> None:
    for choice in (None, CHOICE):
        page = tmp_path / "page.html"
        replace(report, batches=choice).to_html(page)
        text = page.read_text()
        assert ('<svg id="batch"' in text) == (choice is not None)
        assert ("A batch of 32 has the most samples a second" in text) == (choice is not None)
    assert "Samples a second in real steps, taken in turns: 15.0 with 4, 29.0 with 32." in str(CHOICE)
    assert "A batch of 33 would need 12.0 kB more than the limit (predicted)." in str(CHOICE)
    assert "An unmeasured batch might have 30.0% more: times vary" in str(replace(CHOICE, gap=0.3))
    assert "no step was taken" in str(replace(CHOICE, measured_peak_bytes=None)).lower()
    texts = {1254.0: "1,250", 83.24: "83.2", 8.324: "8.32", 0.05224: "0.052", 999.6: "1,000", 125_400.0: "125,000"}
    assert {rate: format_rate(rate) for rate in texts} == texts
