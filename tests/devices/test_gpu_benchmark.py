"""benchmarks/gpu.py, rehearsed on the CPU, so that its first run on a GPU is no lottery."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rotor_py.devices.caching_allocator import replay
from rotor_py.devices.requests import Allocate, Free, Reserved
from rotor_py.devices.table import device_like
from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
from gpu_parts import rows, tables
from gpu_parts.steps import SkippedError

pytestmark = pytest.mark.filterwarnings("ignore")  # compilers warn of themselves

PART = 4  # GPT-2, which is captured


def row(out: Path, name: str) -> dict[str, Any]:
    gpu.main(["--out", str(out), "--part", str(PART), "--tiny", "--row", name])
    found: dict[str, Any] = json.loads((out / f"part{PART}" / f"{name}.json").read_text())
    return found


def test_a_plan_at_the_peak_of_another_way_and_what_the_table_predicted(tmp_path: Path, capsys) -> None:
    found = {name: row(tmp_path, name) for name in ("size", "table", "plain", "checkpoint-blocks")}
    found["plan"] = row(tmp_path, "planned-at-checkpoint-blocks")
    assert {each["status"] for each in found.values()} == {"done"}
    assert found["checkpoint-blocks"]["peak_bytes"] < found["plain"]["peak_bytes"]
    assert found["plan"]["limit_bytes"] == found["checkpoint-blocks"]["peak_bytes"] >= found["plan"]["peak_bytes"]
    assert found["plan"]["loss"] == found["plain"]["loss"] == found["checkpoint-blocks"]["loss"]
    # Tensors without memory are followed as the meter follows those with: up to the 512 bytes of CUDA's blocks.
    assert found["plain"]["peak_bytes"] < found["table"]["predicted_peak_bytes"] < 1.2 * found["plain"]["peak_bytes"]
    assert found["table"]["predicted_reserved_bytes"] >= found["table"]["predicted_peak_bytes"]
    assert (tmp_path / f"part{PART}" / found["plain"]["files"][0]).stat().st_size > 0
    gpu.main(["--out", str(tmp_path), "--table"])
    printed = capsys.readouterr().out
    assert "| checkpoint-blocks |" in printed
    assert "plain, by the table of devices" in printed


def options(out: Path, **changes: Any) -> argparse.Namespace:
    told = {"tiny": True, "no_traces": True, "again": False, "in_process": True, "seconds": 60.0}
    return argparse.Namespace(out=out, **{**told, **changes})


def test_a_failure_costs_one_row_and_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch) -> None:
    ran: list[str] = []

    def good(setting: rows.Setting) -> dict[str, Any]:
        ran.append("good")
        return {"peak_bytes": 1}

    def bad(setting: rows.Setting) -> dict[str, Any]:
        ran.append("bad")
        raise KeyError("a mistake")

    def needs(setting: rows.Setting) -> dict[str, Any]:
        ran.append("needs")
        return setting.result("bad")

    monkeypatch.setattr(rows, "parts", lambda tiny: {PART: {"bad": bad, "good": good, "needs": needs}})
    assert gpu.run_part(PART, options(tmp_path)) == []
    summary = gpu.summarized(options(tmp_path))[f"part{PART}"]
    assert {name: each["status"] for name, each in summary.items()} == {
        "bad": "failed", "good": "done", "needs": "skipped",
    }  # fmt: skip
    assert "KeyError: 'a mistake'" in tables.failures({"part4": summary})
    assert gpu.run_part(PART, options(tmp_path)) == []
    assert ran == ["bad", "good", "needs"]
    gpu.run_part(PART, options(tmp_path, again=True))
    assert ran == ["bad", "good", "needs", "bad", "needs"]


@pytest.mark.parametrize(
    ("code", "says"), [(-9, "its process ended with -9"), (None, "it took more than 60 s")], ids=["killed", "too long"]
)
def test_a_process_that_ends_without_a_word_is_a_failed_row(tmp_path: Path, monkeypatch, code, says) -> None:
    monkeypatch.setattr(gpu, "bounded", lambda command, seconds: ("the last words", code))
    found = gpu.run_apart(PART, "plain", options(tmp_path), 60.0)
    assert (found["status"], found["error"], found["output"]) == ("failed", says, "the last words")


def test_a_part_leaves_what_it_has_no_time_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "parts", lambda tiny: {PART: {"one": lambda setting: {}, "two": lambda setting: {}}})
    assert gpu.run_part(PART, options(tmp_path, seconds=0.0)) == ["one", "two"]
    assert not list(tmp_path.glob("part*/*.json"))


def test_commands_are_stopped_when_their_time_is_over() -> None:
    """With those that they started, which have the same output: until it ends, there would be more to read."""
    output, code = gpu.bounded(["sh", "-c", "echo begun; sleep 600 & sleep 600"], 0.5)
    assert (output, code) == ("begun\n", None)


def test_every_file_with_a_test_for_gpus_is_a_row() -> None:
    found = gpu.test_files()
    assert {"devices.test_caching_allocator", "profiling.test_memory", "distributed.test_fsdp"} <= set(found)
    assert "solver.test_threads" not in found


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
        ("NVIDIA A100-SXM4-80GB", 79.3, "NVIDIA A100 SXM 80 GB"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "NVIDIA A100 SXM 40 GB"),
        ("NVIDIA L40S", 44.5, "NVIDIA L40S 48 GB"),
        ("NVIDIA L4", 22.0, "NVIDIA L4 24 GB"),
        ("NVIDIA L40", 44.5, None),
        ("NVIDIA GeForce RTX 4090", 23.6, "NVIDIA GeForce RTX 4090 24 GB"),
        ("AMD Instinct MI300X", 191.9, "AMD Instinct MI300X 192 GB"),
        ("Quadro P400", 2.0, None),
    ],
)
def test_a_device_is_found_by_what_it_calls_itself(reported: str, memory: float, found: str | None) -> None:
    device = device_like(reported, int(memory * 2**30))
    assert (device.name if device else None) == found


def test_a_chain_alone_is_checkpointed_in_sequence() -> None:
    with pytest.raises(SkippedError, match=r"no nn\.Sequential"):
        rows.by_way(rows.cases(tiny=True)["GPT-2 medium"], "checkpoint_sequential",
                    FixedSize(Path(), torch.device("cpu"), tiny=True, traces=False))  # fmt: skip


class FixedSize(rows.Setting):
    def result(self, row: str) -> dict[str, Any]:
        return {"batch": 2}


@pytest.mark.slow
@pytest.mark.parametrize("part", [3, 4, 5, 6])
def test_the_whole_rehearsal_runs(tmp_path: Path, part: int) -> None:
    gpu.main(["--out", str(tmp_path), "--part", str(part), "--tiny", "--in-process", "--no-traces"])
    found = gpu.summarized(options(tmp_path))[f"part{part}"]
    assert not {name: each.get("error") for name, each in found.items() if each["status"] == "failed"}
    assert found["plain"]["status"] == "done"


@pytest.mark.slow
def test_tests_and_rows_in_processes_of_their_own(tmp_path: Path) -> None:
    assert gpu.run_tests("profiling.test_storage", options(tmp_path), 120.0)["status"] == "done"
    found = gpu.run_apart(PART, "size", options(tmp_path), 120.0)
    assert (found["status"], found["batch"]) == ("done", 2)
