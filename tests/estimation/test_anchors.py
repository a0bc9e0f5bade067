"""The benchmark of published times: which rows efficiencies are fitted to, and what page and table have of it."""

from __future__ import annotations

import inspect
import re

import anchors
import anchors_memory
import device_table
import pytest
from anchors_mpt import SIZES, published

from rotor_py.estimation.device_table import find_device
from rotor_py.report import provenance
from tests.docs.pages import ROOT


def test_the_range_of_seconds_is_wider_than_the_typical_error_on_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- anchors-cpu -->")[2].partition("<!-- /anchors-cpu -->")[0].splitlines()
    errors = [int(found[1]) for row in rows if (found := re.search(r"\| (\d+)% \|$", row))]
    assert (min(errors), max(errors)) == (7, 17)
    assert "7 to 17 %" in inspect.getsource(provenance)
    assert 1 + 1.4 * max(errors) / 100 < provenance._ANCHORED < provenance._GUESSED


def test_a_step_of_mpt_computes_what_its_parameters_say() -> None:
    """6 operations for each parameter and token, and the published formula for attention, halved as it is causal."""
    row = next(row for row in published("h100") if (row.size, row.length, row.batch) == ("1b", 2048, 14))
    width, layers, _ = SIZES["1b"]
    parameters = layers * 12 * width**2 + anchors.VOCABULARY * width
    tokens = row.batch * row.length
    # Flash attention's backward computes the scores again: five products for the forward's two, not four.
    expected = tokens * (6 * parameters + layers * (2 + 5) * width * row.length)
    operations = sum(count * work.operations for work, count in anchors.step_of(row).items())
    assert operations == pytest.approx(expected, rel=0.01)


def test_the_page_has_the_table_as_it_is() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"<!-- device-table -->\n{device_table.table()}\n<!-- /device-table -->" in page


@pytest.mark.slow
def test_the_table_has_the_efficiencies_that_the_benchmark_fits() -> None:
    told, steps = find_device("h100").efficiencies, published("h100")
    found = anchors.fitted(find_device("h100"), steps).efficiencies
    assert (told.matmul, told.attention, told.streaming) == (found.matmul, found.attention, found.streaming)
    assert told.anchor.startswith(f"{len(steps)} steps of MPT models")


@pytest.mark.slow
def test_one_process_of_a_world_holds_its_share_of_parameters_gradients_and_state() -> None:
    """Twice as many processes: half as much of four numbers of 32 bits for each parameter, and all else as it was."""
    found = {world: anchors_memory.predicted(world, layers=1, length=64)["allocated_gib"] for world in (2, 4)}
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    parameters = block + 2 * 128_256 * 4096 + 4096
    expected = 4 * 4 * parameters * (1 / 2 - 1 / 4) / 2**30
    assert found[2] - found[4] == pytest.approx(expected, rel=0.005)
