"""benchmarks/gpu.py, rehearsed on the CPU, so that its first run on a GPU is no lottery."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rotor_py.estimation.caching_allocator import Allocate, Free, Reserved, replay
from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
from gpu_parts import packing, rows, tables
from gpu_parts.device_like import device_like
from gpu_parts.setting import Setting
from gpu_parts.short_table import short_table

pytestmark = pytest.mark.filterwarnings("ignore")  # compilers warn of themselves

PART = 4  # GPT-2, which is captured


def row(out: Path, name: str) -> dict[str, Any]:
    gpu.main(["--out", str(out), "--work", str(out / "rows"), "--part", str(PART), "--tiny", "--row", name])
    found: dict[str, Any] = json.loads((out / "rows" / f"part{PART}" / f"{name}.json").read_text())
    return found


@pytest.mark.slow
def test_a_plan_at_the_peak_of_another_way_and_what_was_estimated(tmp_path: Path, capsys) -> None:
    names = "size", "plain", "checkpoint-blocks", "estimate-store-all", "estimate-least", "planned-half"
    found = {name: row(tmp_path, name) for name in names}
    found["plan"] = row(tmp_path, "planned-at-checkpoint-blocks")
    assert {each["status"] for each in found.values()} == {"done"}
    assert found["checkpoint-blocks"]["peak_bytes"] < found["plain"]["peak_bytes"]
    assert found["plan"]["limit_bytes"] == found["checkpoint-blocks"]["peak_bytes"] >= found["plan"]["peak_bytes"]
    assert found["plan"]["loss"] == found["plain"]["loss"] == found["checkpoint-blocks"]["loss"]
    stored, least = found["estimate-store-all"], found["estimate-least"]
    # Tensors without memory are followed as the meter follows those with: up to the 512 bytes of CUDA's blocks.
    assert stored["peak_bytes"] == found["plain"]["peak_bytes"]
    assert stored["peak_bytes"] < stored["predicted_peak_bytes"] < 1.2 * stored["peak_bytes"]
    assert stored["predicted_overhead"] == 1.0
    assert least["limit_bytes"] == stored["predicted_least_bytes"] >= least["predicted_peak_bytes"]
    assert least["peak_bytes"] < least["predicted_peak_bytes"] < 1.2 * least["peak_bytes"]
    assert stored["peak_bytes"] < stored["predicted_step_bytes"]
    # At the least limit, times choose among plans, and those taken here are not those estimated: two plans, two peaks.
    assert all(
        each["predicted_step_bytes"] <= each["predicted_peak_bytes"] <= each["predicted_reserved_bytes"]
        for each in (stored, least)
    )
    assert (tmp_path / "rows" / f"part{PART}" / found["plain"]["files"][0]).stat().st_size > 0
    gpu.main(["--out", str(tmp_path), "--work", str(tmp_path / "rows"), "--table"])
    printed = capsys.readouterr().out
    assert "| checkpoint-blocks |" in printed
    assert "| store-all |" in printed
    assert "Predicted for a CPU; efficiencies: no anchor." in printed
    short = short_table(packing.rows_in(tmp_path / "rows"))
    assert "| GPT-2 medium | 2 |" in short
    assert "Measured on: CPU" in short


def options(work: Path, **changes: Any) -> argparse.Namespace:
    told = {"tiny": True, "no_traces": True, "again": False, "in_process": True, "seconds": 60.0, "part": PART}
    return argparse.Namespace(out=work, work=work, **{**told, **changes})


def run_part(told: argparse.Namespace) -> list[tuple[int, str]]:
    return gpu.run_rows(gpu.rows_wanted(told), told)


def test_a_failure_costs_one_row_and_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch) -> None:
    ran: list[str] = []

    def good(setting: Setting) -> dict[str, Any]:
        ran.append("good")
        return {"peak_bytes": 1}

    def bad(setting: Setting) -> dict[str, Any]:
        ran.append("bad")
        raise KeyError("a mistake")

    def needs(setting: Setting) -> dict[str, Any]:
        ran.append("needs")
        return setting.result("bad")

    monkeypatch.setattr(rows, "parts", lambda tiny: {PART: {"bad": bad, "good": good, "needs": needs}})
    assert run_part(options(tmp_path)) == []
    summary = packing.rows_in(tmp_path)[f"part{PART}"]
    assert {name: each["status"] for name, each in summary.items()} == {
        "bad": "failed", "good": "done", "needs": "skipped",
    }  # fmt: skip
    assert "KeyError: 'a mistake'" in tables.failures({"part4": summary})
    assert run_part(options(tmp_path)) == []
    assert ran == ["bad", "good", "needs"]
    run_part(options(tmp_path, again=True))
    assert ran == ["bad", "good", "needs", "bad", "needs"]


def trace(work: Path, name: str, size: int) -> None:
    path = work / "part4" / f"{name}.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(name.encode() * size)


def test_results_are_few_files_that_another_machine_goes_on_from(tmp_path: Path) -> None:
    work, out, elsewhere = (tmp_path / each for each in ("work", "out", "elsewhere"))
    gpu.written(work / "part2" / "calibration.json", {"status": "done", "toml": "[here]"})
    gpu.written(work / "part4" / "plain.json", {"status": "done", "peak_bytes": 7})
    trace(work, "plain", 3)
    packing.pack(work, out, "the tables")
    assert {each.name for each in out.iterdir()} == {"summary.json", "tables.md", "calibration.toml", "traces-1.tar"}
    assert (out / "calibration.toml").read_text() == "[here]"
    packing.unpack(out, elsewhere)
    assert packing.rows_in(elsewhere) == packing.rows_in(work)
    trace(elsewhere, "selective", 3)
    packing.pack(elsewhere, out, "the tables")
    packing.unpack(out, tmp_path / "third")
    assert (tmp_path / "third" / "part4" / "plain.trace.json.gz").read_bytes() == b"plain" * 3


def test_commands_are_stopped_when_their_time_is_over() -> None:
    """With those that they started, which have the same output: until it ends, there would be more to read."""
    output, code = gpu.bounded(["sh", "-c", "echo begun; sleep 600 & sleep 600"], 0.5)
    assert (output, code) == ("begun\n", None)


def test_without_a_gpu_only_the_rehearsal_runs(tmp_path: Path, capsys) -> None:
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
        ("NVIDIA H100 80GB HBM3", 79.1, "NVIDIA H100 SXM 80 GB"),
        ("NVIDIA H100 PCIe", 79.1, "NVIDIA H100 PCIe 80 GB"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "NVIDIA A100 SXM 40 GB"),
        ("NVIDIA L40S", 44.5, "NVIDIA L40S 48 GB"),
        ("NVIDIA L40", 44.5, None),
        ("AMD Instinct MI300X", 191.9, "AMD Instinct MI300X 192 GB"),
    ],
)
def test_a_device_is_found_by_what_it_calls_itself(reported: str, memory: float, found: str | None) -> None:
    device = device_like(reported, int(memory * 2**30))
    assert (device.name if device else None) == found


@pytest.mark.slow
@pytest.mark.parametrize("part", [3, 4, 5, 6])
def test_the_whole_rehearsal_runs(tmp_path: Path, part: int) -> None:
    out, work = tmp_path / "out", tmp_path / "rows"
    gpu.main(["--out", str(out), "--work", str(work), "--part", str(part), "--tiny", "--in-process", "--no-traces"])
    found = packing.rows_in(work)[f"part{part}"]
    assert not {name: each.get("error") for name, each in found.items() if each["status"] == "failed"}
    assert found["plain"]["status"] == "done"
    assert {each.name for each in out.iterdir()} == {"summary.json", "tables.md"}
