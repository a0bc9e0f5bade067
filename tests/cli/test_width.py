"""Reports in a narrow terminal, in a wide one, and in a pipe."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from rotor_cli.facts import Facts
from rotor_cli.text_report import comparison, console, render
from rotor_py import Checkpointable, Verification, format_bytes
from rotor_py.report.terminal import Prose
from rotor_py.units import format_seconds
from rotor_py.validate.comparison import compare_at_limit
from tests.checkpointable.steps import Residual, between, square


@pytest.fixture(scope="module")
def facts() -> Facts:
    """A verified plan of stages whose names are as long as those of captured models."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for at in range(8):
        name = f"encoder_layers_{at}_self_attention_query_projection_and_output_dense_{at}"
        model.add_module(name, Residual(nn.Linear(64, 64), nn.Tanh()))
    planned = Checkpointable(model, torch.randn(256, 64), loss=square)
    limit = between(planned, 0.3)
    sequence, arguments = planned.compute_sequence(limit), ("loss=loss", "optimizer=optimizer", "fresh_grads=True")
    found = Facts("a_network.py", "cpu", limit, planned.budget, planned.inspection_values, sequence)
    verified = Verification(1_980_000, 0.376, 0.0, 3_030_000, 0.296)
    rows = tuple(replace(row, verified=verified) if row.fits else row for row in compare_at_limit(found, model))
    return replace(found, arguments=arguments, compared=rows, verified=verified)


def shown(renderable: Any, width: int) -> list[str]:
    out = Console(width=width, highlight=False, color_system=None)
    with out.capture() as captured:
        out.print(renderable)
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_every_number_stands_in_one_line_and_code_is_python(facts: Facts, width: int) -> None:
    lines = shown(render(facts), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cost in facts.measurement.stages:
        seconds = map(format_seconds, (cost.forward_seconds, cost.backward_seconds))
        numbers = [*seconds, *map(format_bytes, (cost.activation_bytes, cost.saved_bytes))]
        assert re.search(r" +".join(map(re.escape, numbers)), text), numbers
    begins = "".join(line.split()[0] for line in lines if line)
    assert all(name in begins for name in facts.measurement.names), "names are folded, not cut"
    assert "…" not in text.replace(str(facts.sequence), "").partition("sequence")[0]
    code = lines[next(at for at, line in enumerate(lines) if line.startswith("use it")) :]
    compile("\n".join(line[10:] for line in code), "code", "exec")
    assert "optimizer=optimizer" in "".join(code)


@pytest.mark.parametrize("width", [60, 80])
def test_the_comparison_keeps_every_word_and_number(facts: Facts, width: int) -> None:
    lines = shown(comparison(facts.compared), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    begins = "".join(line.split("  ")[0] for line in lines)
    for row in facts.compared:
        assert row.strategy.replace(" ", "") in begins.replace(" ", "")
        numbers = ["yes" if row.fits else "no", format_bytes(row.peak_bytes), format_seconds(row.step_seconds)]
        numbers += [f"{row.overhead - 1:+.1%}", *(["1.98 MB", "376 ms"] if row.fits else [])]
        assert any(re.search(" +".join(map(re.escape, numbers)), line) for line in lines), row.strategy


@pytest.mark.parametrize("width", [20, 33, 60])
def test_a_line_never_ends_between_a_number_and_its_unit(width: int) -> None:
    text = "net fits in 2.00 MB on cpu: predicted peak 1.98 MB, 12 % more, which needs 3.03 MB, in 2 steps of 45.1 ms."
    lines = shown(Prose(text), width)
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= width
    assert not any(re.match(r"(MB|ms|%)", line) for line in lines)
    for line, following in pairwise(lines):  # no line could have taken more
        assert len(line) + 1 + len(re.match(r"(\d\S* (MB|%|ms)\S*|\S+)", following)[0]) > width
    assert shown(Prose("a-word-of-33-letters-is-not-broken 2 MB"), 20)[-1] == "2 MB"
    assert shown(Prose("an anchor of\ntwo lines"), 40) == ["an anchor of", "two lines"]


def test_a_pipe_and_a_report_are_as_wide_as_columns_says_without_colours(plan, model_file, facts, monkeypatch) -> None:
    for columns, width in (("60", 60), ("100", 100), ("200", 100), ("many", 100), ("0", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert console().width == width or columns == "200"
        assert 0.9 * width < max(map(len, str(facts).splitlines())) <= width
    monkeypatch.setenv("COLUMNS", "80")
    found = plan(model_file(), "--sweep", "--mem-limit", "2MB", "--compare")
    assert found.exit_code == 0, found.output
    assert max(map(len, found.stdout.splitlines())) in (79, 80)
    assert "\x1b" not in found.output
