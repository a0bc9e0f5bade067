"""rotor-plan --sweep: memory against time; and --max-overhead, which plans for time, and needs close times."""

import json
import re
import runpy
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch import nn

from rotor_cli.facts import Facts
from rotor_cli.text_report import chart, curve
from rotor_py import Checkpointable, least_limit, sweep
from rotor_py.measure.rounds import StageTimes
from rotor_py.report.report import sweep_of
from rotor_py.report.sweep import Point, Sweep, saving
from rotor_solver import Persistent, Sequence, recompute_all, store_all
from tests.cli.conftest import SMALL
from tests.fields import ends

NONE = Sequence([])
POINTS = tuple(Point("", size, more, more, NONE) for size, more in ((400, 1.5), (520, 1.1), (900, 1.05), (1100, 1.0)))
HAND = Sweep(100, 1100, POINTS, (Point("sqrt", 700, 1.3, 1.3, NONE), Point("revolve", 390, 4.0, 4.0, NONE)))


def drawn(sweep: Sweep, width: int) -> str:
    out = Console(width=width, highlight=False)
    with out.capture() as captured:
        out.print(curve(sweep, "net.py", width))
    return captured.get()


def facts_of(**changes: int) -> Facts:
    """A measured model, with a changed budget."""
    layers = [nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.ReLU()) for i in range(4)]
    network = Checkpointable(nn.Sequential(*layers), torch.randn(8, 3, 32, 32), loss=torch.sum)
    budget = replace(network.budget, **changes)
    stored = store_all(budget.chain)
    return Facts("net", "cpu", budget.peak_bytes(stored), budget, network.inspection_values, stored)


def test_a_sweep_needs_no_limit_goes_from_least_to_storing_all_and_is_alone_or_below_plans(plan, model_file, tmp_path):
    shown = plan(model_file(), "--sweep", "--json", tmp_path / "found.json").stdout
    assert shown.startswith("net.py: ")
    assert "of activation memory" in shown
    assert "use it" not in shown
    assert "│" not in plan(model_file(), "--max-overhead", "10%").stdout, "the curve was not asked for"
    both = plan(model_file(), "--sweep", "--mem-limit", "1GB", "--compare").stdout
    assert both.index("use it") < both.index("predicted peak  ") < both.index("of activation memory") < both.index("│")
    found = json.loads((tmp_path / "found.json").read_text())
    assert not {"plan", "mem_limit"} & {*found}
    points, stored = found["sweep"]["points"], found["store_all"]["peak_bytes"]
    assert (points[0]["mem_limit"], points[-1]["mem_limit"]) == (found["min_bytes"], stored)
    assert (points[-1]["overhead"], points[-1]["activations_saved"]) == (1, 0)
    saved, activations = stored - found["min_bytes"], stored - found["fixed_bytes"]
    assert points[0]["activations_saved"] == pytest.approx(saved / activations)
    assert len(points) > 2
    for less, more in pairwise(points):
        assert less["mem_limit"] < more["mem_limit"]
        assert less["step_seconds"] > more["step_seconds"]
    strategies = {point["strategy"]: point["mem_limit"] for point in found["sweep"]["strategies"]}
    assert (strategies["recompute-all"], strategies["store-all"]) == (found["min_bytes"], stored)


@pytest.mark.parametrize("changes", [{}, {"snapshot_bytes": 5000}, {"before_bytes": 1_400_000}])
def test_every_point_is_the_fastest_plan_of_its_limit_and_the_first_one_as_fast(changes):
    facts = facts_of(**changes)
    found = sweep_of(facts)
    assert found.points[0].mem_limit == facts.budget.least_bytes()
    assert found.points[-1].overhead == 1
    for point in found.points:
        assert facts.budget.peak_bytes(point.sequence) == point.mem_limit
        fastest = facts.seconds_of(facts.budget.solve(point.mem_limit, Persistent()))
        assert point.step_seconds == pytest.approx(fastest)
    for point in found.points[1:]:
        slower = facts.seconds_of(facts.budget.solve(point.mem_limit - 1, Persistent()))
        assert slower > point.step_seconds


def test_what_computing_twice_needs_more_than_it_saves_is_left_out():
    facts = facts_of(snapshot_bytes=10**9)
    assert facts.budget.peak_bytes(recompute_all(facts.chain)) > facts.store_all_bytes
    found = sweep_of(facts)
    assert [point.mem_limit for point in found.points] == [facts.store_all_bytes]
    assert "No plan needs less than storing everything" in saving(found, 0.1)
    assert "│" not in drawn(found, 60)


def test_the_sentence_says_what_more_time_saves():
    assert saving(HAND, 0.10) == (
        "10 % more time saves 58 % of activation memory: a limit of 520 instead of 1.10 kB. "
        "The least possible is 400, at 50 % more time."
    )
    assert saving(HAND, 0.07).startswith("5.0 % more time saves 20 % of activation memory: a limit of 900 ")
    assert saving(HAND, 0.01) == saving(HAND, 0.07), "the first saving, where there is none for so little time"
    large = [replace(each, mem_limit=1000 * each.mem_limit) for each in POINTS]
    large[-1:] = Point("", 1_099_900, 1.01, 1.01, NONE), large[-1]
    assert saving(Sweep(100_000, 1_100_000, tuple(large)), 0.02).startswith("5.0 % more time saves 20 %"), "not 0.0 %"
    assert saving(HAND, 2).startswith("50 % more time saves 70 % of activation memory: a limit of 400 instead of 1.10")
    assert saving(HAND, 2).endswith(" Less is not possible.")
    # The least limit for a time is the first that is fast enough.
    limits = {overhead: HAND.least_for(overhead).mem_limit for overhead in (0, 0.04, 0.05, 0.09, 0.1001, 0.4, 0.5, 9)}
    assert limits == {0: 1100, 0.04: 1100, 0.05: 900, 0.09: 900, 0.1001: 520, 0.4: 520, 0.5: 400, 9: 400}


def test_a_time_is_planned_for_at_the_least_limit_and_saved(report, model_file, tmp_path):
    found = report(model_file(), "--max-overhead", "60%", "--verify")
    assert 1 < found["plan"]["overhead"] <= 1.6
    assert found["mem_limit"] == found["plan"]["peak_bytes"] < found["store_all"]["peak_bytes"]
    slower = [point for point in found["sweep"]["points"] if point["mem_limit"] < found["mem_limit"]]
    assert all(point["overhead"] > 1.6 for point in slower)
    assert found["verify"]["measured_peak_bytes"] <= found["mem_limit"]
    assert found["verify"]["max_grad_difference"] == 0
    assert report(model_file(), "--max-overhead", "0%")["plan"]["overhead"] == 1
    least = report(model_file(), "--max-overhead", "1e9 %", "--save", tmp_path / "plan.json")
    assert least["mem_limit"] == least["min_bytes"]
    model = Checkpointable(runpy.run_path(model_file())["model"], plan=tmp_path / "plan.json")
    model(torch.randn(8, 3, 32, 32)).sum().backward()
    assert str(model.sequence) == least["plan"]["sequence"]


def test_the_chart_is_a_step_function_with_every_letter_of_the_list_also_where_they_coincide_and_far_outside():
    steps = [(0, 4.0), (4, 2.0), (8, 0.0)]
    marks = [("A", 4, 3.0), ("E", 4, 3.0), ("B", 8, 0.0), ("C", 9, 1.0), ("D", 0, 5.0)]
    lines = chart(steps, marks, width=19, height=5, top="400 %", ends=("0 B", "8 B"))
    assert lines == [
        "   400 % │D↑●●",
        "         │    AE",
        "         │    ●●●●",
        "         │       C→",
        "     0 % │        B",
        "         └─────────",
        "          0 B   8 B",
    ]
    names = [f"strategy {number}" for number in range(26)]
    same = [Point(name, 1100, 1.0, 1.0, NONE) for name in names[:24]]
    far = [Point(names[24], 2000, 9.0, 9.0, NONE), Point(names[25], 900, 0.9, 0.9, NONE)]
    picture, _, listed = drawn(replace(HAND, strategies=(*same, *far)), 60).partition("└")
    letters = re.findall(r"^([A-Z])  strategy", listed, re.MULTILINE)
    assert len(letters) == 26
    cells = "".join(line.partition("│")[2] for line in picture.splitlines())
    assert sorted(re.findall("[A-Z]", cells)) == letters
    assert "Y→↑" in cells
    assert "Z↓" in cells
    assert "arrows: outside the chart" in " ".join(picture.split())


def test_the_curve_is_as_wide_as_the_console():
    lines = drawn(HAND, 60).splitlines()
    assert max(map(len, lines)) == 60
    rows = [line for line in lines if "│" in line]
    assert len(rows) == 14
    for column in range(10, 59):
        assert any(re.match("[●AB←↑]", line[column]) for line in rows if column < len(line))
    assert "←B↑" in rows[0], "revolve needs less memory and more time than any plan"
    assert {"A  sqrt", "B  revolve"} <= {"  ".join(line.split()[:2]) for line in lines}
    assert not any(re.match(r" *(%|[kMGT]B\b)", line) for line in lines), "an amount is broken"


def test_without_matplotlib_the_plot_is_refused_before_anything_is_measured(plan, model_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = plan(model_file("raise RuntimeError('loaded')"), "--sweep", "--plot", tmp_path / "curve.svg")
    ends(result, 2, "not_installed", name="--plot")
    assert "pip install 'rotor-plan[plot]'" in result.stderr


def test_the_plot_is_written_with_the_strategies_on_it(plan, model_file, tmp_path):
    pytest.importorskip("matplotlib")
    image = tmp_path / "curve.svg"
    assert plan(model_file(), "--sweep", "--plot", image).exit_code == 0
    text = image.read_text()
    for words in ("net.py", "recompute-all", "store-all", "sqrt", "revolve", "more time than"):
        assert words in text


def test_only_a_limit_that_is_read_off_the_curve_needs_close_times(model_file, report, monkeypatch) -> None:
    found, begin = [], StageTimes.__init__
    layers, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)

    def noting(times: StageTimes, *, closely: bool = False) -> None:
        found.append(closely)
        begin(times, closely=closely)

    monkeypatch.setattr(StageTimes, "__init__", noting)
    script = SMALL.replace("model =", "net =") + "loss(net(sample(8))).backward()\n"
    files = [model_file(SMALL), model_file(script, "script.py")]
    for run, expected in (
        (lambda: least_limit(layers, batch, max_overhead=0.1, loss=torch.sum), True),
        (lambda: least_limit(layers, batch, loss=torch.sum), False),
        (lambda: sweep(layers, batch, loss=torch.sum), False),
        (lambda: Checkpointable(layers, mem_limit="1MB", loss=torch.sum)(batch), False),
        (lambda: report(files[0], "--mem-limit", "1GB", "--no-cache"), False),
        *((lambda file=file: report(file, "--max-overhead", "50%", "--no-cache"), True) for file in files),
    ):
        found.clear()
        run()
        assert {*found} == {expected}
