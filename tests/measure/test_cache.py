"""Measurements that are kept on disk: found again where all is the same, and nowhere else."""

import json
import operator
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling.stage.seconds import StageRun
from rotor_profiling.stage.stage_signature import Unlike, stage_signature
from rotor_py import Checkpointable
from rotor_py.measure import cache, discovery_pass, stage_measurer
from rotor_py.measure.cache import MeasurementCache, UnstableKeyError, cache_folder, code_of, digest_of
from rotor_py.measure.rounds import StageTimes
from rotor_py.stage.forward_state import GraphEffects
from tests.checkpointable.steps import Tower
from tests.quick import run_python

BATCH = torch.randn(16, 8)
ADD = StageTimes.add


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(32, 8))


@pytest.fixture(autouse=True)
def factors(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each kind of stage, run by run, whatever the clock shows: those of small layers are far apart."""
    found, runs = [1e-3], Counter[Hashable]()

    def add_other(times: StageTimes, kind: Hashable, run: StageRun, *, exact: bool = False) -> None:
        seconds = found[runs[kind] % len(found)]
        runs[kind] += 1
        node = run.node and (seconds, 2 * seconds)
        ADD(times, kind, StageRun(((seconds, seconds),) * len(run.ways), node), exact=exact)

    monkeypatch.setattr(StageTimes, "add", add_other)
    return found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The measuring functions that are called from now on."""
    found: list[str] = []
    for name in ("measure_ways", "time_ways"):
        run = getattr(stage_measurer, name)
        noting = lambda *args, run=run, name=name, **keywords: (found.append(name), run(*args, **keywords))[1]  # noqa: E731
        monkeypatch.setattr(stage_measurer, name, noting)
    return found


def costs(model: nn.Module, value: torch.Tensor = BATCH, **options: Any) -> Any:
    return Checkpointable(model, value, loss=torch.sum, **options).inspection_values


@pytest.mark.parametrize("make", [layers, partial(Tower, 8, 4)])
def test_a_copy_of_a_model_made_again_or_read_from_a_file_is_not_measured(make, measured, tmp_path) -> None:
    model = make()
    torch.save(model, tmp_path / "model.pt")
    first = costs(model)
    assert {"measure_ways", "time_ways"} <= set(measured)
    measured.clear()
    for copy in (make(), torch.load(tmp_path / "model.pt", weights_only=False)):
        second = costs(copy)
        assert measured == []
        assert (second.stages, second.ways, second.carried) == (first.stages, first.ways, first.carried)
        assert second.snapshot_bytes == first.snapshot_bytes


@pytest.mark.timed
@pytest.mark.parametrize(("second", "kept"), [(1.1e-3, True), (2e-3, False)])
def test_times_that_are_far_apart_are_measured_anew(second, kept, measured, factors) -> None:
    factors.append(second)
    costs(layers())
    measured.clear()
    costs(layers())
    assert (measured == []) == kept
    assert "measure_ways" not in measured  # bytes are exact on any machine


def _with_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        costs(layers())
    finally:
        torch.set_num_threads(before)


CHANGES: dict[str, Callable[[], object]] = {
    "batch": lambda: costs(layers(), BATCH[:8]),
    "dtype": lambda: costs(layers().double(), BATCH.double()),
    "gradients": lambda: costs(layers(), fresh_grads=True),
    "random state": lambda: costs(layers(), preserve_rng_state=False),
    "frozen": lambda: costs(layers().requires_grad_(False).append(nn.Linear(8, 8))),
    "threads": lambda: _with_threads(torch.get_num_threads() + 1),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16)(costs)(layers()),
    "off": lambda: costs(layers(), cache=False),
}


def test_whatever_differs_is_measured(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    costs(layers())
    for name, change in CHANGES.items():
        measured.clear()
        change()
        assert "measure_ways" in measured, name
    measured.clear()
    with monkeypatch.context() as patch:  # the discovery pass finds other effects
        patch.setattr(discovery_pass, "find_effects", lambda *_: GraphEffects(graph_dependent=True))
        costs(layers())
    assert "measure_ways" in measured


def test_keys_say_what_a_value_is() -> None:
    values: list[Any] = [1, 1.0, True, "1", b"1", None, (1,), ((1,),), (1, 1), frozenset({1}), torch.float32, slice(1)]
    values += [torch.nn.functional.linear, torch.cos, torch.sin, torch.ops.aten.mm.default, operator.add, nn.Linear]
    digests = [digest_of(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digests == [digest_of(value) for value in values]
    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    for value in (Unlike(id(values)), lambda: None, object(), BATCH, stage_signature(hooked, BATCH)):
        with pytest.raises(UnstableKeyError):
            digest_of(value)


def rewritten(file: Path, digest: bool, **changes: Any) -> None:
    data = {**json.loads(file.read_text()), **changes}
    if digest:
        del data["digest"]
        data["digest"] = cache.digest_of_data(data)
    file.write_text(json.dumps(data))


RUNS = [{"ways": [[5.0, 5.0]], "node": [5.0, 5.0]}]
NEGATIVE = [{"ways": [[-5.0, -5.0]], "node": [-5.0, -5.0]}]
DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda file: file.write_text(""),
    "forged": lambda file: rewritten(file, False, runs=RUNS),
    "forged with its digest": lambda file: rewritten(file, True, runs=NEGATIVE),
    "without runs": lambda file: rewritten(file, True, runs=[]),
    "a pipe": lambda file: [file.unlink(), os.mkfifo(file)],
}


def test_a_damaged_file_counts_as_none_and_is_written_anew(measured: list[str]) -> None:
    expected = costs(layers())
    for name, damage in DAMAGES.items():
        measured.clear()
        costs(layers())
        assert measured == [], name
        for file in cache_folder().iterdir():
            damage(file)
        found = costs(layers())
        assert "measure_ways" in measured, name
        assert [each.saved_bytes for each in found.stages] == [each.saved_bytes for each in expected.stages]


def test_very_many_files_make_room_and_a_folder_that_cannot_be_written_to_costs_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    assert costs(layers()).stages
    monkeypatch.setattr("rotor_py.measure.cache._MOST_FILES", 10)
    for number in range(12):
        (tmp_path / str(number)).touch()
    MeasurementCache(tmp_path, "here")
    assert len(list(tmp_path.iterdir())) == 6


RUN = """
import layers, torch
from torch import nn
from rotor_py import Checkpointable
from rotor_py.measure import stage_measurer

noted = []
measure_ways = stage_measurer.measure_ways
stage_measurer.measure_ways = lambda runners, *rest: noted.append(runners[0].name) or measure_ways(runners, *rest)
Checkpointable(nn.Sequential(nn.Linear(8, 8), layers.Own()), loss=torch.sum).measure(torch.randn(4, 8))
print(*noted)
"""
LAYERS = """
import helper
from torch import nn

class Own(nn.Module):
    def forward(self, value):
        return helper.applied(value)
"""
HELPER = "def applied(value):\n    return value.sin()\n"


class Own(nn.Module):
    def forward(self, value: object) -> object:
        return value


@pytest.mark.slow
def test_another_process_measures_a_layer_again_only_if_the_code_that_it_calls_has_changed(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (time.time() - 60,) * 2)

    def measured_stages() -> set[str]:
        return set(run_python(RUN, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).stdout.split())

    for name, text in (("layers.py", LAYERS), ("helper.py", HELPER)):
        write(name, text)
    assert measured_stages() == {"0", "1"}
    assert measured_stages() == set()
    write("helper.py", HELPER.replace("sin", "cos"))
    assert measured_stages() == {"1"}  # torch's layer is the same


def test_code_of_a_class_is_unknown_without_a_file_or_if_the_file_was_written_since(monkeypatch) -> None:
    class Inside(Own):
        pass

    typed = type("Typed", (Own,), {"__module__": "notebook"})
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    for kind in (Inside, typed):
        assert code_of(kind) is None
        with pytest.raises(UnstableKeyError, match="whose code may change"):
            digest_of(stage_signature(kind(), None))
    for name, module in list(sys.modules.items()):  # those that other tests have written since, or removed
        if (file := cache._users_file(module)) is not None and Path(__file__).parents[1] not in file.parents:
            monkeypatch.delitem(sys.modules, name)
    for started, known in ((time.time(), True), (Path(__file__).stat().st_mtime - 1, False)):
        monkeypatch.setattr(cache, "_STARTED", started)
        cache._digest.cache_clear()
        assert (code_of(Own) is not None) == known
    cache._digest.cache_clear()
