"""Benchmarks: gpu.py rehearsed on the CPU, published times that efficiencies are fitted to, and their pages."""

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

import anchors
import device_table
import gpu
import pytest
from anchors_mpt import SIZES, published
from gpu_parts import packing, rows
from gpu_parts.device_like import device_like
from gpu_parts.setting import Setting

from rotor_py.estimation.caching_allocator import Allocate, Free, Reserved, replay
from rotor_py.estimation.device_table import find_device
from rotor_py.report import numbers
from tests.docs.pages import ROOT

PART = 4  # GPT-2, which is captured


def test_a_failure_costs_one_row_finished_rows_stay_and_a_cpu_only_rehearses(tmp_path, monkeypatch, capsys) -> None:
    ran: list[str] = []

    def good(setting: Setting) -> dict[str, Any]:
        ran.append("good")
        return {"peak_bytes": 1}

    def bad(setting: Setting) -> dict[str, Any]:
        ran.append("bad")
        raise KeyError("a mistake")

    monkeypatch.setattr(rows, "parts", lambda tiny: {PART: {"bad": bad, "good": good}})
    told = {"tiny": True, "no_traces": True, "in_process": True, "seconds": 60.0, "part": PART}
    for again in (False, False, True):
        options = argparse.Namespace(out=tmp_path, work=tmp_path, again=again, **told)
        assert gpu.run_rows(gpu.rows_wanted(options), options) == []
    summary = packing.rows_in(tmp_path)[f"part{PART}"]
    assert {name: each["status"] for name, each in summary.items()} == {"bad": "failed", "good": "done"}
    assert ran == ["bad", "good", "bad"]
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert "--tiny is a rehearsal" in capsys.readouterr().err


def test_the_history_of_the_allocator_is_replayed_under_its_addresses() -> None:
    history = [
        {"action": "segment_alloc", "addr": 0, "size": 2**21, "stream": 0},
        {"action": "alloc", "addr": 0, "size": 600, "stream": 0},
        {"action": "free_requested", "addr": 0, "size": 600, "stream": 0},
        {"action": "free_completed", "addr": 0, "size": 600, "stream": 0},
        {"action": "free_completed", "addr": 4096, "size": 512, "stream": 0},  # older than the history
        {"action": "alloc", "addr": 0, "size": 100, "stream": 7},
    ]
    assert rows.requests_of(history) == [Allocate(0, 600), Free(0), Allocate(0, 100, 7)]
    assert replay(rows.requests_of(history)) == Reserved(1024, 2 * 2**21)


@pytest.mark.parametrize(
    ("reported", "memory", "found"),
    [
        ("NVIDIA H200", 139.8, "NVIDIA H200 SXM 141 GB"),
        ("NVIDIA H100 PCIe", 79.1, "NVIDIA H100 PCIe 80 GB"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "NVIDIA A100 SXM 40 GB"),
        ("NVIDIA L40", 44.5, None),
    ],
)
def test_a_device_is_found_by_what_it_calls_itself(reported: str, memory: float, found: str | None) -> None:
    device = device_like(reported, int(memory * 2**30))
    assert (device.name if device else None) == found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # compilers warn of themselves
def test_the_whole_rehearsal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "rows"), "--part", str(PART)]
    gpu.main([*told, "--tiny", "--in-process", "--no-traces"])
    found = packing.rows_in(tmp_path / "rows")[f"part{PART}"]
    assert not {name: each.get("error") for name, each in found.items() if each["status"] == "failed"}
    assert found["plain"]["status"] == "done"
    assert found["checkpoint-blocks"]["peak_bytes"] < found["plain"]["peak_bytes"]
    assert "| store-all |" in capsys.readouterr().out
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"summary.json", "tables.md"}


def test_the_page_has_the_table_as_it_is_and_the_range_of_seconds_is_wider_than_its_typical_error() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"<!-- device-table -->\n{device_table.table()}\n<!-- /device-table -->" in page
    rows = page.partition("<!-- anchors-cpu -->")[2].partition("<!-- /anchors-cpu -->")[0].splitlines()
    errors = [int(found[1]) for row in rows if (found := re.search(r"\| (\d+)% \|$", row))]
    assert (min(errors), max(errors)) == (7, 17)
    assert "7 to 17 %" in inspect.getsource(numbers)
    assert 1 + 1.4 * max(errors) / 100 < numbers._ANCHORED < numbers._GUESSED


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


@pytest.mark.slow
def test_the_table_has_the_efficiencies_that_the_benchmark_fits() -> None:
    told, steps = find_device("h100").efficiencies, published("h100")
    found = anchors.fitted(find_device("h100"), steps).efficiencies
    assert (told.matmul, told.attention, told.streaming) == (found.matmul, found.attention, found.streaming)
    assert told.anchor.startswith(f"{len(steps)} steps of MPT models")
