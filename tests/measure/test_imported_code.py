"""Layers of the user's own are found again in the next process, unless any code that it imports has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from rotor_profiling import stage_kind
from rotor_py.measure.cache import imported_code
from rotor_py.measure.cache.imported_code import code_of
from rotor_py.measure.cache.stable_key import UnstableKeyError, digest_of

START = """
import os, runpy, sys
import torch._dynamo, rotor_py

for _ in sys.stdin:
    child = os.fork()
    if not child:
        runpy.run_path("run.py")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
"""For each line that it reads, a process that runs the program: it has imported what takes seconds, and no more."""
RUN = """
import layers, torch
from torch import nn
from rotor_py import Checkpointable
from rotor_py.measure import stage_measurer

measured = []
measure_ways = stage_measurer.measure_ways
stage_measurer.measure_ways = lambda runners, *rest: measured.append(runners[0].name) or measure_ways(runners, *rest)
model = Checkpointable(nn.Sequential(nn.Linear(8, 8), layers.Own()), loss=torch.sum)
model.measure(torch.randn(4, 8))
print(*measured)
"""
LAYERS = """
import helper
from torch import nn

class Own(nn.Module):
    def forward(self, value):
        return helper.applied(value)
"""
HELPER = """
def applied(value):
    return value.sin()
"""


class Own(nn.Module):
    def forward(self, value: object) -> object:
        return value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program of three files, and what starts it, written a minute ago."""
    for name, text in (("start.py", START), ("run.py", RUN), ("layers.py", LAYERS), ("helper.py", HELPER)):
        write(tmp_path / name, text)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.write_text(text)
    os.utime(file, (time.time() - 60,) * 2)


@pytest.fixture
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "start.py"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def measured(started: subprocess.Popen[str]) -> set[str]:
    """The stages that a run of the program measures."""
    assert started.stdin is not None
    assert started.stdout is not None
    started.stdin.write("run\n")
    started.stdin.flush()
    line = started.stdout.readline()
    assert line, "the program has failed"
    return set(line.split())


@pytest.mark.slow
def test_a_layer_is_measured_again_when_what_it_calls_has_changed(folder: Path, started: subprocess.Popen[str]) -> None:
    assert measured(started) == {"0", "1"}
    assert measured(started) == set()
    write(folder / "helper.py", HELPER.replace("sin", "cos"))
    assert measured(started) == {"1"}  # that of torch is the same


def test_what_was_written_since_it_was_read_is_nobody_s_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported_code, "_STARTED", time.time())
    imported_code._digest.cache_clear()
    assert code_of(Own) is not None
    monkeypatch.setattr(imported_code, "_STARTED", Path(__file__).stat().st_mtime - 1)
    imported_code._digest.cache_clear()
    assert code_of(Own) is None
    imported_code._digest.cache_clear()


def test_a_class_without_a_file_is_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inside(Own):
        pass

    typed = type("Typed", (Own,), {"__module__": "notebook"})
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    for kind in (Inside, typed):
        assert code_of(kind) is None
        with pytest.raises(UnstableKeyError, match="whose code may change"):
            digest_of(stage_kind(kind(), None))
