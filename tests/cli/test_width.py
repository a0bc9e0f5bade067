"""Reports in a narrow terminal, in a wide one, and in a pipe."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from rotor_cli.facts import Facts
from rotor_cli.text_report import Comparison, render
from rotor_py import Checkpointable, Verification, format_bytes
from rotor_py.report.report import sweep_of
from rotor_py.report.terminal import Prose, broken
from rotor_py.units import format_seconds
from rotor_py.validate.comparison import compare_at_limit
from tests.checkpointable.steps import between, square

WIDTHS = (60, 100)


class Block(nn.Sequential):
    """A stage of several layers."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value)


def facts_of(*names: str) -> Facts:
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in names:
        model.add_module(name, Block(nn.Linear(64, 64), nn.Tanh()))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    planned = Checkpointable(model, torch.randn(256, 64), loss=square, optimizer=optimizer)
    limit = between(planned, 0.3)
    sequence = planned.compute_sequence(limit)
    assert planned.budget is not None
    facts = Facts(
        "a_network.py", "cpu", limit, planned.budget, planned.inspection_values, sequence,
        arguments=("loss=loss", "optimizer=optimizer", "fresh_grads=True"),
    )  # fmt: skip
    verified = Verification(1_980_000, 0.376, 0.0, 3_030_000, 0.296)
    rows = tuple(replace(row, verified=verified) if row.fits else row for row in compare_at_limit(facts, model))
    others = {row.strategy: row.sequence for row in rows}
    return replace(facts, compared=rows, verified=verified, sweep=sweep_of(facts, 500, others))


@pytest.fixture(scope="module")
def short() -> Facts:
    return facts_of(*map(str, range(8)))


@pytest.fixture(scope="module")
def long() -> Facts:
    """Names as those of captured models."""
    return facts_of(*(f"encoder_layers_{i}_self_attention_query_projection_and_output_dense_{i}" for i in range(8)))


def shown(renderable: Any, width: int) -> list[str]:
    out = Console(width=width, highlight=False, color_system=None)
    with out.capture() as captured:
        out.print(renderable)
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["short", "long"])
def test_no_line_is_wider_and_every_number_of_a_stage_stands_in_one_line(request, kind: str, width: int) -> None:
    facts = request.getfixturevalue(kind)
    lines = shown(render(facts), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cost in facts.measurement.stages:
        numbers = [
            format_seconds(cost.forward_seconds),
            format_seconds(cost.backward_seconds),
            format_bytes(cost.activation_bytes),
            format_bytes(cost.saved_bytes),
        ]
        assert re.search(r" +".join(map(re.escape, numbers)), text), numbers
    for action in facts.actions():
        assert action in text or all(word in text.split() for word in action.split())
    whole, first = "".join(line.strip() for line in lines), "".join(line.split()[0] for line in lines if line)
    assert all(name in whole or name in first for name in facts.measurement.names)
    assert "…" not in text.replace(str(facts.sequence), "").partition("sequence")[0]  # nothing is cut off


@pytest.mark.parametrize("width", WIDTHS)
def test_names_break_where_their_parts_do(long: Facts, width: int) -> None:
    lines = shown(render(long), width)
    for name in long.measurement.names:
        begin = [line for line in lines if line and name.startswith(line.split()[0]) and "_" in line.split()[0]]
        assert begin
        assert all(line.split()[0] == name or line.split()[0].endswith(("_", ".", "+", "-")) for line in begin)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_comparison_keeps_every_word_and_number(short: Facts, width: int) -> None:
    lines = shown(Comparison(short.compared), width)
    assert max(map(len, lines)) <= width
    for row in short.compared:
        (line, *_) = [line for line in lines if line.startswith(f"{row.strategy} ")]
        assert format_bytes(row.peak_bytes) in line
        assert format_seconds(row.step_seconds) in line
        assert f"{row.overhead - 1:+.1%}" in line
        assert line.split(row.strategy)[1].split()[0] == ("yes" if row.fits else "no")
    assert sum("1.98 MB" in line and "376 ms" in line for line in lines) == sum(row.fits for row in short.compared)
    assert "…" not in "".join(lines)
    side_by_side = ["strategy", "fits", "predicted", "peak", "time", "overhead", "measured", "peak", "measured", "time"]
    assert (lines[0].split() == side_by_side) == (width == 100)


def test_a_comparison_in_a_very_narrow_terminal_breaks_names_at_their_hyphens(short: Facts) -> None:
    lines = shown(Comparison(short.compared), 50)
    assert max(map(len, lines)) <= 50
    assert any(line.split()[0] == "griewank-" for line in lines if line)
    assert all(format_bytes(row.peak_bytes) in "\n".join(lines) for row in short.compared)


@pytest.mark.parametrize("width", [20, 21, 33, 47, 60])
def test_a_line_never_ends_between_a_number_and_its_unit(width: int) -> None:
    text = "net fits in 2.00 MB on cpu: predicted peak 1.98 MB, 12 % more, which needs 3.03 MB, in 2 steps of 45.1 ms."
    lines = shown(Prose(text), width)
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= width
    assert not any(re.match(r"(MB|ms|%)", line) for line in lines)
    for line, following in pairwise(lines):  # no line could have taken more
        assert len(line) + 1 + len(re.match(r"(\d\S* (MB|%|ms)\S*|\S+)", following)[0]) > width


def test_a_name_that_is_too_long_in_one_piece_is_cut_at_the_width() -> None:
    assert broken("a.bb.ccc", 4) == ["a.", "bb.", "ccc"]
    assert broken("a.bb.ccc", 5) == ["a.bb.", "ccc"]
    assert broken("abcdefgh", 3) == ["abc", "def", "gh"]
    assert broken("", 3) == [""]
    assert broken("ab", 0) == ["a", "b"]


def test_the_three_lines_are_python_at_any_width(short: Facts) -> None:
    for width in (50, 60, 100):
        lines = shown(render(short), width)
        begin = next(at for at, line in enumerate(lines) if line.startswith("use it"))
        code = "\n".join(line[10:] for line in lines[begin:])
        compile(code, "code", "exec")
        assert "optimizer=optimizer" in code
        assert max(map(len, lines[begin:])) <= width


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("80", 80), (None, 100), ("many", 100), ("0", 100)])
def test_a_pipe_is_as_wide_as_columns_says_and_without_colours(plan, model_file, monkeypatch, columns, width) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    more = ("--mem-limit", "2MB", "--compare", "--verify") if width == 60 else ()
    found = plan(model_file(), "--sweep", *more)
    assert found.exit_code == 0, found.output
    assert max(map(len, found.stdout.splitlines())) in (width, width - 1)
    assert "\x1b" not in found.output


def test_a_printed_report_is_as_wide_as_the_terminal(short: Facts, monkeypatch) -> None:
    for columns, width in ((60, 60), (100, 100), (200, 100)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert 0.9 * width < max(map(len, str(short).splitlines())) <= width
