"""The picture of samples a second over the batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rotor_py.report import Report
from rotor_py.report.batch_choice import BatchChoice, BatchPoint, format_rate
from rotor_py.report.curve_pictures import HEIGHT, LEFT, PHONE, TOP, WIDTH, batch_picture

POINTS = (
    BatchPoint(2, 10.0, 10.0, True),
    BatchPoint(4, 16.0, 16.0, True),
    BatchPoint(8, 22.0, None, False),
    BatchPoint(32, 30.0, None, True),
)
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
    assert picture.line.count("L") == 3
    assert picture.stored.count("L") == 1
    assert [text for _, text in picture.batches] == ["2", "4", "8", "32"]
    assert sum(column.width for column in picture.columns) == pytest.approx(WIDTH)
    said = [column.title for column in picture.columns]
    assert said[0] == "batch 2: 10.0 samples a second, storing everything 10.0"
    assert said[2] == "batch 8: 22.0 samples a second, storing everything does not fit (predicted)"
    assert batch_picture(replace(CHOICE, points=POINTS[-1:])) is None


def test_a_phone_has_the_numbers_of_fewer_batches_and_always_the_largest() -> None:
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
    assert "One of 33 would need 12.0 kB more than there is (predicted)." in str(CHOICE)
    assert "one might have 30.0% more: times vary here" in str(replace(CHOICE, gap=0.3))
    assert "no step was taken" in str(replace(CHOICE, measured_peak_bytes=None)).lower()


def test_rates_have_three_digits() -> None:
    texts = {1254.0: "1,250", 83.24: "83.2", 8.324: "8.32", 0.05224: "0.052", 999.6: "1,000", 125_400.0: "125,000"}
    assert {rate: format_rate(rate) for rate in texts} == texts
