"""What is kept of stages, by colour and by word: in the table, the picture and the page."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from rotor_cli.facts import Facts
from rotor_cli.write_outputs import BACK, OUT, PREDICTED, trace
from rotor_py import Report
from rotor_py.report.curve_pictures import PHONE
from rotor_py.report.numbers import WORDS, stage_rows
from rotor_py.report.page import page
from rotor_py.report.report import sweep_of
from rotor_py.report.step_pictures import schedule_picture
from rotor_py.report.terminal import stage_table

KINDS = ["part", "packed", "rounded", "elsewhere", "input", *["kept"] * 7]


def test_every_row_of_the_table_has_its_kind_beside_its_words(mixed: Report, report: Report) -> None:
    plain = list(stage_rows(report))
    assert {row.kind for row in plain if row.action.startswith("recomputed")} <= {""}
    assert {row.kind for row in plain if row.action.startswith("stored")} == {"kept"}
    rows = list(stage_rows(mixed))
    assert [row.kind for row in rows] == KINDS
    for row, word in zip(rows, ("in part:", "packed:", "in bf16:", "elsewhere:", "checkpointed"), strict=False):
        assert word in row.action


def test_a_terminal_has_a_style_for_every_kind(mixed: Report) -> None:
    file = io.StringIO()
    Console(file=file, width=100, force_terminal=True, color_system="standard", no_color=False).print(
        stage_table(mixed)
    )
    styles = [re.search(r"\x1b\[(\d+)mstored (?:in|packed|else)", line) for line in file.getvalue().splitlines()]
    assert len({found[1] for found in styles if found}) == 4


def test_a_picture_has_every_kind_for_as_long_as_it_is_there(mixed: Report) -> None:
    picture = schedule_picture(mixed)
    lives = {stage: [each for each in picture.kept if each.stage == stage] for stage in range(12)}
    for stage, kind in enumerate(KINDS[:3]):
        assert [each.kind for each in lives[stage]][-1] == kind
    moved = [each for each in lives[3] if each.kind != "input"]
    assert [(each.kind, each.first, each.last) for each in moved] == [
        ("kept", 3, 8),
        ("elsewhere", 8, 16),
        ("kept", 16, 22),
    ]
    assert [each.stays for each in moved] == [True, True, False]
    assert "elsewhere" in next(each.title for each in moved if each.kind == "elsewhere")
    assert set(picture.kinds) == set(WORDS)


def test_copies_have_a_lane_each_beside_the_operations_during_which_they_run(mixed: Report) -> None:
    out, back = schedule_picture(mixed).copied
    assert (out.lane, back.lane) == (0, 1)
    assert out.first == 4, "it begins when the forward ends"
    assert back.first == 16, "it begins right before the operation before which it is fetched"
    assert out.last > out.first
    assert back.last > back.first
    slow = replace(mixed.budget, link=replace(mixed.budget.link, out_bytes_per_second=1e-3))
    out, back = schedule_picture(replace(mixed, budget=slow)).copied
    assert out.last == 8, "the operation that waits for it begins when it is over"
    assert schedule_picture(mixed, PHONE).width <= PHONE


def test_a_page_has_a_legend_for_what_there_is_alone(mixed: Report, report: Report) -> None:
    text, plain = page(mixed, sweep_of(report)), page(report, sweep_of(report))
    for kind, words in WORDS.items():
        entry = f'<li><i class="s-{kind}"></i>in memory: {words}</li>'
        assert entry in text
        assert (entry in plain) is (kind in ("kept", "input"))
    for words in ("copied out", "copied back"):
        assert words in text
        assert words not in plain
    assert plain.count("↑") == 1, "in the style of a sorted column"
    for kind in KINDS:
        assert f'<td><i class="s-{kind}"></i>' in text
        assert f".s-{kind} " in text


def test_a_trace_has_tracks_for_copies_where_there_are_any(mixed: Report, report: Report) -> None:
    def tracks(of: Report) -> dict[int, list[dict[str, object]]]:
        found = Facts(of.title, of.device, of.mem_limit, of.budget, of.measurement, of.sequence)
        events = [event for event in trace(found)["traceEvents"] if event["pid"] == PREDICTED]
        named = {event["tid"] for event in events if event["name"] == "thread_name"}
        return {tid: [each for each in events if each["ph"] == "X" and each["tid"] == tid] for tid in named}

    found = tracks(mixed)
    (out,), (back,) = found[OUT], found[BACK]
    moved = mixed.budget.moved_bytes(mixed.sequence)
    assert out["args"] == back["args"] == {"moved_bytes": moved}
    assert out["dur"] == pytest.approx(moved / 1e9 * 1e6, abs=0.25)
    assert out["name"] == f"copies out: {mixed.measurement.names[3]}"
    assert not tracks(report).keys() & {OUT, BACK}
