"""With how many threads stages are timed beside other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import LossCost
from rotor_profiling.stage.seconds import StageRun
from rotor_py import Checkpointable
from rotor_py.measure import stage_measurer
from rotor_py.measure.measurement import Measurement
from rotor_py.measure.stage_measurer import StageMeasurer
from rotor_py.measure.walks import free_cores
from rotor_py.measure.walks.free_cores import running_elsewhere, so_many_threads, threads_left

CPU = torch.device("cpu")
BATCH = torch.randn(256, 64)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(free_cores, "running_elsewhere", running_elsewhere)
    with so_many_threads(2):
        yield


@pytest.mark.parametrize(
    ("cores", "others", "left"), [(2, 0, None), (2, 1, 1), (2, 2, 1), (2, 9, 1), (16, 2, None), (3, 1, None)]
)
def test_threads_have_the_cores_that_are_left(
    cores: int, others: int, left: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(free_cores, "running_elsewhere", lambda: others)
    assert threads_left(CPU) == left
    said = f"other programs run on {min(others, cores)} of {cores} cores: stages are timed with {left} of 2 threads"
    assert (said in caplog.text) == (left is not None)
    assert threads_left(torch.device("cuda")) is None
    with so_many_threads(left):
        assert torch.get_num_threads() == (left or 2)
    assert torch.get_num_threads() == 2


def test_what_runs_elsewhere_is_the_least_of_several_looks_without_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for looks, found in ((["3/9", "4/9", "3/9", "5/9", "3/9"], 2), (["3/9", "1/9"], 0), (["1/9"], 0)):
        left = iter(looks)
        monkeypatch.setattr(Path, "read_text", lambda _, left=left: f"0.10 0.20 0.30 {next(left)} 123\n")
        assert running_elsewhere() == found


def test_where_nobody_counts_nothing_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert running_elsewhere() == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts what runs")
def test_a_program_that_computes_is_seen() -> None:
    program = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = running_elsewhere()
        other.kill()
    assert found >= 1


class Crowd:
    """A machine with two cores and two other programs, and what a measurer did beside them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.timed: list[int] = []
        """the threads of each walk's runs"""
        self.weighed: list[int] = []
        """those of runs that show bytes"""
        self.runs: list[StageRun] = []
        self.counted: list[StageRun] = []
        self.patch = patch
        self._note("time_ways", self.timed)
        self._note("measure_ways", self.weighed)
        measurement = StageMeasurer.measurement

        def ending(measurer: StageMeasurer, loss: LossCost) -> Measurement:
            self.counted = [run for kind in {*measurer._kinds} for run in measurer._times.runs_of(kind)]
            return measurement(measurer, loss)

        patch.setattr(StageMeasurer, "measurement", ending)
        patch.setattr(os, "cpu_count", lambda: 2)
        self.others(2)

    def others(self, many: int) -> None:
        self.patch.setattr(free_cores, "running_elsewhere", lambda: many)

    def _note(self, name: str, found: list[int]) -> None:
        run = getattr(stage_measurer, name)

        def noting(*arguments: Any, **options: Any) -> Any:
            found.append(torch.get_num_threads())
            result = run(*arguments, **options)
            if name == "time_ways":
                self.runs.append(result[0])
            return result

        self.patch.setattr(stage_measurer, name, noting)


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    return Crowd(monkeypatch)


def network(limit: str | None = None) -> Checkpointable:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    return Checkpointable(layers, mem_limit=limit, loss=torch.sum)


def test_beside_others_stages_are_timed_with_fewer_threads_and_weighed_with_all(crowd: Crowd) -> None:
    network().measure(BATCH)
    assert {*crowd.weighed} == {2}
    assert {*crowd.timed} == {1}
    assert crowd.counted
    assert all(run in crowd.runs for run in crowd.counted)  # none of those that show bytes
    assert torch.get_num_threads() == 2


def test_but_not_for_the_plan_within_one_limit(crowd: Crowd) -> None:
    network("1GB")(BATCH).sum().backward()
    assert {*crowd.weighed, *crowd.timed} == {2}


def test_what_was_found_with_fewer_threads_is_kept_as_that(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.measure.walks.stage_times.TOO_FAR", float("inf"))  # times are those of the clock
    network().measure(BATCH)
    found = sorted(crowd.counted, key=repr)
    for timed in (crowd.timed, crowd.weighed):
        timed.clear()
    network().measure(BATCH)  # beside the same others
    assert not crowd.timed
    assert not crowd.weighed
    assert sorted(crowd.counted, key=repr) == found
    crowd.others(0)
    network().measure(BATCH)
    assert {*crowd.timed} == {2}
