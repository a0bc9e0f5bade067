"""benchmarks/gpu.py, rehearsed on the CPU, so that its first run on a GPU is no lottery."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rotor_py.estimation.caching_allocator import Allocate, Free, Reserved, replay
from rotor_py.estimation.device_table import find_device
from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import report
from gpu_parts import packing, rows, tables
from gpu_parts.device_like import device_like
from gpu_parts.order import by_priority
from gpu_parts.setting import Setting
from gpu_parts.short_table import short_table
from gpu_parts.steps import SkippedError

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


def test_the_short_table_has_the_models_of_which_all_is_there() -> None:
    assert short_table({"part4": {"size": {"status": "done", "batch": 2}, "plain": {"status": "failed"}}}) == ""


def test_put_replaces_only_the_text_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu one -->\nold\n<!-- /gpu one -->\nafter\n")
    monkeypatch.setattr(report, "PAGES", (page,))
    report.put("gpu other", "new")
    assert "old" in page.read_text()
    report.put("gpu one", "new")
    assert page.read_text() == "before\n<!-- gpu one -->\nnew\n<!-- /gpu one -->\nafter\n"
    measured = [each.stem for each in (ROOT / "benchmarks" / "results").glob("gpu-*.json")]
    tables = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"<!-- {name.replace('-', ' ', 1)} -->" in tables for name in measured)
    assert "<!-- gpu-short " in (ROOT / "README.md").read_text()


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


@pytest.mark.parametrize(
    ("code", "says"), [(-9, "its process ended with -9"), (None, "it took more than 60 s")], ids=["killed", "too long"]
)
def test_a_process_that_ends_without_a_word_is_a_failed_row(tmp_path: Path, monkeypatch, code, says) -> None:
    monkeypatch.setattr(gpu, "bounded", lambda command, seconds: ("the last words", code))
    found = gpu.run_apart(PART, "plain", options(tmp_path), 60.0)
    assert (found["status"], found["error"], found["output"]) == ("failed", says, "the last words")


def test_a_call_leaves_what_it_has_no_time_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "parts", lambda tiny: {PART: {"one": lambda setting: {}, "two": lambda setting: {}}})
    assert run_part(options(tmp_path, seconds=0.0)) == [(PART, "one"), (PART, "two")]
    assert not list(tmp_path.glob("part*/*.json"))


@pytest.mark.parametrize("wanted", [(gpu.TESTS, "profiling.test_memory"), (PART, "plain")])
@pytest.mark.parametrize(("seconds", "kept"), [(100.0, False), (500.0, True)])
def test_a_row_at_the_end_of_a_call_is_left_and_one_that_had_all_its_time_has_failed(
    tmp_path: Path, monkeypatch, wanted: tuple[int, str], seconds: float, kept: bool
) -> None:
    monkeypatch.setattr(gpu, "bounded", lambda command, seconds: ("half", None))
    left = gpu.run_rows([wanted], options(tmp_path, in_process=False, seconds=seconds))
    assert left == ([] if kept else [wanted])
    assert len(list(tmp_path.glob("part*/*.json"))) == kept


def test_what_shows_most_comes_first() -> None:
    """Of a row that needs another one, that comes before; what is compiled comes last."""
    told = [(1, "profiling.test_memory")]
    told += [(part, name) for part, found in rows.parts(tiny=False).items() for name in found]
    found = by_priority(told)
    assert sorted(found) == sorted(told)
    assert found[:3] == [(2, "calibration"), (3, "size"), (3, "plain")]
    names = [name for part, name in found if part == PART]
    assert names.index("estimate-store-all") < names.index("estimate-half") < names.index("selective")
    assert all(names.index(name.removeprefix("planned-at-")) < names.index(name) for name in names if "-at-" in name)
    assert (
        found.index((6, "estimate-least")) < found.index((1, "profiling.test_memory")) < found.index((3, "selective"))
    )
    assert {"compile" in name for _, name in found[-20:]} == {True}


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


def test_what_is_there_is_newer_than_what_was_packed(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    gpu.written(work / "part4" / "plain.json", {"status": "failed"})
    packing.pack(work, out, "")
    gpu.written(work / "part4" / "plain.json", {"status": "done"})
    packing.unpack(out, work)
    assert packing.rows_in(work) == {"part4": {"plain": {"status": "done"}}}


def test_traces_are_packed_as_long_as_there_is_room_and_the_others_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packing, "_ROOM", 10_000)
    for name in "abcdefghi":
        trace(tmp_path / "work", name, 4000)
    trace(tmp_path / "work", "z", 20_000)
    packing.pack(tmp_path / "work", tmp_path / "out", "")
    sizes = [each.stat().st_size for each in (tmp_path / "out").glob("traces-*.tar")]
    assert len(sizes) == 4
    assert max(sizes) < 10_000 + 2**14  # a tar file ends with up to so many zeros
    left = json.loads((tmp_path / "out" / "summary.json").read_text())["traces_left_out"]
    assert len(left) == 10 - 4
    assert left[-1] == "part4/z.trace.json.gz"


def test_the_calibration_stands_beside_the_table() -> None:
    known = find_device("h100")
    row = {"status": "done", "measured": asdict(replace(known, bandwidth=3e12)), "table": asdict(known), "toml": "[a]"}
    text = tables.calibrated(row)
    assert f"| bandwidth | 3e+12 | {known.bandwidth:.4g} |" in text
    assert tables.calibrated({**row, "table": None})
    assert tables.calibrated({"status": "skipped"}) == ""


def test_commands_are_stopped_when_their_time_is_over() -> None:
    """With those that they started, which have the same output: until it ends, there would be more to read."""
    output, code = gpu.bounded(["sh", "-c", "echo begun; sleep 600 & sleep 600"], 0.5)
    assert (output, code) == ("begun\n", None)


def test_every_file_with_a_test_for_gpus_is_a_row() -> None:
    found = gpu.test_files()
    assert {"estimation.test_caching_allocator", "profiling.test_memory", "distributed.test_fsdp"} <= set(found)
    assert "solver.test_solve" not in found


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


class FixedSize(Setting):
    def result(self, row: str) -> dict[str, Any]:
        return {"batch": 2}


@pytest.mark.slow
@pytest.mark.parametrize("part", [3, 4, 5, 6])
def test_the_whole_rehearsal_runs(tmp_path: Path, part: int) -> None:
    out, work = tmp_path / "out", tmp_path / "rows"
    gpu.main(["--out", str(out), "--work", str(work), "--part", str(part), "--tiny", "--in-process", "--no-traces"])
    found = packing.rows_in(work)[f"part{part}"]
    assert not {name: each.get("error") for name, each in found.items() if each["status"] == "failed"}
    assert found["plain"]["status"] == "done"
    assert {each.name for each in out.iterdir()} == {"summary.json", "tables.md"}


@pytest.mark.slow
def test_tests_and_rows_in_processes_of_their_own(tmp_path: Path) -> None:
    assert gpu.run_tests("profiling.test_storage", options(tmp_path), 120.0)["status"] == "done"
    found = gpu.run_apart(PART, "size", options(tmp_path), 120.0)
    assert (found["status"], found["batch"]) == ("done", 2)


def test_a_folder_of_something_else_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(SystemExit, match="none of this script's; give another --out"):
        packing.unpack(tmp_path, tmp_path / "rows")
