"""benchmarks/gpu.py, rehearsed on the CPU, so that its first run on a GPU is no lottery."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gpu
import pytest
from gpu_parts import packing, rows
from gpu_parts.device_like import device_like
from gpu_parts.setting import Setting

from rotor_py.estimation.caching_allocator import Allocate, Free, Reserved, replay

pytestmark = pytest.mark.filterwarnings("ignore")  # compilers warn of themselves

PART = 4  # GPT-2, which is captured


def test_a_failure_costs_one_row_and_finished_rows_do_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ("NVIDIA H100 PCIe", 79.1, "NVIDIA H100 PCIe 80 GB"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "NVIDIA A100 SXM 40 GB"),
        ("NVIDIA L40", 44.5, None),
    ],
)
def test_a_device_is_found_by_what_it_calls_itself(reported: str, memory: float, found: str | None) -> None:
    device = device_like(reported, int(memory * 2**30))
    assert (device.name if device else None) == found


@pytest.mark.slow
def test_the_whole_rehearsal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "rows"), "--part", str(PART)]
    gpu.main([*told, "--tiny", "--in-process", "--no-traces"])
    found = packing.rows_in(tmp_path / "rows")[f"part{PART}"]
    assert not {name: each.get("error") for name, each in found.items() if each["status"] == "failed"}
    assert found["plain"]["status"] == "done"
    assert found["checkpoint-blocks"]["peak_bytes"] < found["plain"]["peak_bytes"]
    assert "| store-all |" in capsys.readouterr().out
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"summary.json", "tables.md"}
