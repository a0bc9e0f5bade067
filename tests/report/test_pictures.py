"""The two pictures of a step, as data, against the simulator and the sequence; and the kinds of what is kept."""

import io
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from rotor_cli.facts import Facts
from rotor_cli.write_outputs import BACK, OUT, PREDICTED, trace
from rotor_py import Report, simulate
from rotor_py.report.curve_pictures import PHONE
from rotor_py.report.numbers import WORDS, stage_rows
from rotor_py.report.report import page, sweep_of
from rotor_py.report.step_pictures import HEIGHT, TOP, layers_of, lives, memory_picture, schedule_picture
from rotor_py.report.terminal import stage_table
from rotor_solver import moments


def test_layers_add_up_to_the_simulated_memory_and_reach_the_peak_below_the_limit(report: Report) -> None:
    simulated, beside = simulate(report.chain, report.sequence), report.budget.beside_chain(report.sequence)
    layers = list(layers_of(report, moments(report.chain, report.sequence)))
    for at, (during, after) in enumerate(zip(simulated.during, simulated.after, strict=True)):
        sizes = [layer.sizes[at] for layer in layers]
        assert sum(sizes) == beside + during
        assert sum(sizes[:-1]) == beside + after
    assert max(map(sum, zip(*(layer.sizes for layer in layers), strict=True))) == report.peak_bytes
    picture = memory_picture(report)
    highest = min(float(y) for y in re.findall(r"V([\d.]+)", " ".join(layer.outline for layer in picture.layers)))
    bytes_per_pixel = report.mem_limit / (TOP + HEIGHT - picture.limit_y)
    assert abs((TOP + HEIGHT - highest) * bytes_per_pixel - report.peak_bytes) < 0.1 * bytes_per_pixel
    assert TOP < picture.limit_y <= highest
    far = memory_picture(replace(report, mem_limit=100 * report.peak_bytes))
    assert far.limit_y is None, "it would flatten the picture"
    assert far.layers == memory_picture(replace(report, mem_limit=None)).layers


def test_every_operation_is_in_both_pictures_also_on_a_phone_and_what_is_kept_is_the_sequences(report: Report) -> None:
    operations = list(map(str, report.sequence))
    ran = schedule_picture(report).ran
    assert [one.text for one in ran] == operations
    assert [one.row for one in ran] == list(range(len(operations)))
    assert [column.title.split()[0] for column in memory_picture(report).columns] == operations
    again = sum("(recompute)" in one.title for one in ran)
    assert again == sum(one.kind == "again" for one in ran) > 0
    memory, schedule = memory_picture(report, PHONE, PHONE), schedule_picture(report, PHONE)
    assert max(memory.width, schedule.width) <= PHONE
    assert len(memory.columns) == len(operations)
    narrow = schedule_picture(report, 120)
    assert narrow.width <= 120
    places = [stage * narrow.cell for stage, _ in narrow.numbers]
    assert all(after - before >= 12 for before, after in pairwise(places)), "numbers stand apart"
    found = moments(report.chain, report.sequence)
    for stage in range(len(report.chain)):
        for life in lives(report.chain, found, stage, "one"):
            for row, moment in enumerate(found):
                present = stage + 1 in moment.attached if life.kind == "kept" else moment.inputs.get(stage, 0) > 0
                if life.first <= row < life.last:
                    assert present
                elif row == life.last and not life.stays:
                    assert not present


KINDS = ["part", "packed", "rounded", "elsewhere", "input", *["kept"] * 7]


def test_every_row_of_the_table_has_its_kind_beside_its_words_and_a_style_in_a_terminal(mixed, report) -> None:
    plain = list(stage_rows(report))
    assert {row.kind for row in plain if row.action.startswith("recomputed")} <= {""}
    assert {row.kind for row in plain if row.action.startswith("stored")} == {"kept"}
    rows = list(stage_rows(mixed))
    assert [row.kind for row in rows] == KINDS
    for row, word in zip(rows, ("in part:", "packed:", "in bf16:", "elsewhere:", "checkpointed"), strict=False):
        assert word in row.action
    console = Console(file=(file := io.StringIO()), width=100, force_terminal=True, color_system="standard")
    console.print(stage_table(mixed))
    assert len({*re.findall(r"\x1b\[(\d+)mstored (?:in|packed|else)", file.getvalue())}) == 4


def test_a_picture_has_every_kind_and_every_copy_for_as_long_as_it_is_there(mixed: Report) -> None:
    picture = schedule_picture(mixed)
    lives = {stage: [each for each in picture.kept if each.stage == stage] for stage in range(12)}
    for stage, kind in enumerate(KINDS[:3]):
        assert [each.kind for each in lives[stage]][-1] == kind
    moved = [each for each in lives[3] if each.kind != "input"]
    expected = [("kept", 3, 8), ("elsewhere", 8, 16), ("kept", 16, 22)]
    assert [(each.kind, each.first, each.last) for each in moved] == expected
    assert [each.stays for each in moved] == [True, True, False]
    assert "offloaded" in next(each.title for each in moved if each.kind == "elsewhere")
    assert set(picture.kinds) == set(WORDS)
    # Copies have a lane each.
    out, back = picture.copied
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
