"""The two pictures, as data, against the simulator and the sequence."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

from rotor_py import Report, simulate
from rotor_py.report.curve_pictures import PHONE
from rotor_py.report.step_pictures import HEIGHT, TOP, layers_of, lives, memory_picture, schedule_picture
from rotor_solver import moments


def test_layers_add_up_to_the_simulated_memory(report: Report) -> None:
    simulated, beside = simulate(report.chain, report.sequence), report.budget.beside_chain(report.sequence)
    layers = list(layers_of(report, moments(report.chain, report.sequence)))
    for at, (during, after) in enumerate(zip(simulated.during, simulated.after, strict=True)):
        sizes = [layer.sizes[at] for layer in layers]
        assert sum(sizes) == beside + during
        assert sum(sizes[:-1]) == beside + after
    assert max(map(sum, zip(*(layer.sizes for layer in layers), strict=True))) == report.peak_bytes


def test_the_picture_reaches_the_peak_and_the_limit_lies_above_it(report: Report) -> None:
    picture = memory_picture(report)
    highest = min(float(y) for y in re.findall(r"V([\d.]+)", " ".join(layer.outline for layer in picture.layers)))
    bytes_per_pixel = report.mem_limit / (TOP + HEIGHT - picture.limit_y)
    assert abs((TOP + HEIGHT - highest) * bytes_per_pixel - report.peak_bytes) < 0.1 * bytes_per_pixel
    assert TOP < picture.limit_y <= highest
    far = memory_picture(replace(report, mem_limit=100 * report.peak_bytes))
    assert far.limit_y is None, "it would flatten the picture"
    assert far.layers == memory_picture(replace(report, mem_limit=None)).layers


def test_every_operation_is_in_both_pictures(report: Report) -> None:
    operations = list(map(str, report.sequence))
    ran = schedule_picture(report).ran
    assert [one.text for one in ran] == operations
    assert [one.row for one in ran] == list(range(len(operations)))
    assert [column.title.split()[0] for column in memory_picture(report).columns] == operations
    again = sum("(recompute)" in one.title for one in ran)
    assert again == sum(one.kind == "again" for one in ran) > 0


def test_a_phone_has_room_for_every_operation_and_stage(report: Report) -> None:
    memory, schedule = memory_picture(report, PHONE, PHONE), schedule_picture(report, PHONE)
    assert memory.width <= PHONE
    assert len(memory.columns) == len(memory_picture(report).columns)
    assert schedule.width <= PHONE
    narrow = schedule_picture(report, 120)
    assert narrow.width <= 120
    places = [stage * narrow.cell for stage, _ in narrow.numbers]
    assert all(after - before >= 12 for before, after in pairwise(places)), "numbers stand apart"


def test_what_is_kept_and_freed_follows_the_sequence(report: Report) -> None:
    found = moments(report.chain, report.sequence)
    for stage in range(len(report.chain)):
        for life in lives(report.chain, found, stage, "one"):
            for row, moment in enumerate(found):
                present = stage + 1 in moment.attached if life.kind == "kept" else moment.inputs.get(stage, 0) > 0
                if life.first <= row < life.last:
                    assert present
                elif row == life.last and not life.stays:
                    assert not present
