"""Ways of a stage that are measured in a graph of their own alone, or not at all: the bytes are those of all runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rotor_profiling.stage import measured_ways
from rotor_py import Checkpointable
from rotor_py.measure import stage_measurer
from rotor_py.stage.runner import StageRunner
from tests.capture.test_partial_saving import WIDTH, Attention, Gated, NewGelu, Stack

Ways = list[tuple[str | None, Any]]


class NormedDropout(nn.Module):
    """Its mask is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(x))


class DroppedInside(nn.Module):
    """Dropout where it is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.dropout(F.silu(self.inner(self.norm(x))), 0.1))


class Convolutions(nn.Module):
    """Buffers move, and are put back where it runs in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.second, self.other = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other(self.second(F.relu(self.norm(self.first(x)))))


def measured(layer: nn.Module, monkeypatch: pytest.MonkeyPatch, *, briefly: bool) -> tuple[Ways, Counter[str]]:
    """What measuring finds of two such layers, captured, in each way; and the runs of each kind that this took."""
    torch.manual_seed(0)
    found: Ways = []
    runs: Counter[str] = Counter()
    measure_ways = stage_measurer.measure_ways

    def noting(runners: Any, value: Any, place: Any, watch: Any = None, stand_ins: Any = None) -> Any:
        given = stand_ins if briefly else {}
        with monkeypatch.context() as counted:
            for name in ("forward", "attach"):
                run = getattr(StageRunner, name)

                def counting(runner: StageRunner, *args: Any, run: Any = run, name: str = name, **more: Any) -> Any:
                    runs[f"{name} {runner._way}"] += 1
                    return run(runner, *args, **more)

                counted.setattr(StageRunner, name, counting)
            if not briefly:
                counted.setattr(measured_ways, "more_in_training", lambda _: None)
            made = measure_ways(runners, value, place, watch, given)
        found.extend((runner._way, way) for runner, way in zip(runners, made.bytes, strict=True))
        return made

    with monkeypatch.context() as noted:
        noted.setattr(stage_measurer, "measure_ways", noting)
        model = Checkpointable(
            Stack(layer, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
            loss=torch.sum,
            granularity=3,
            cache=False,
            fresh_grads=True,
        )
        model.measure(torch.randn(4, 8, WIDTH))
    return found, runs


@pytest.mark.parametrize("layer", [Gated, NewGelu, Attention, NormedDropout, Convolutions])
def test_bytes_are_those_of_runs_in_both_graphs(layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = layer()
    full, runs = measured(made, monkeypatch, briefly=False)
    brief, fewer = measured(made, monkeypatch, briefly=True)
    assert [name for name, _ in brief] == [name for name, _ in full]
    assert len(full) > 2
    for (name, few), (_, all_of_them) in zip(brief, full, strict=True):
        assert few is None or few == all_of_them, name
    assert sum(fewer.values()) <= sum(runs.values())


def test_a_way_is_run_in_training_s_graph_only_where_that_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs = measured(Gated(), monkeypatch, briefly=True)
    ways = {name.removeprefix("attach ") for name in runs if name.startswith("attach ")} - {"None"}
    assert ways
    assert {name for name in runs if name.startswith("forward ")} == {"forward None"}
    _, runs = measured(Convolutions(), monkeypatch, briefly=True)
    assert {name for name in runs if name.startswith("forward ")} > {"forward None"}


def test_a_way_that_another_one_stands_in_for_is_run_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, runs = measured(NewGelu(), monkeypatch, briefly=True)
    left_out = Counter(name for name, way in found if way is None)
    assert left_out
    for name, stages in left_out.items():
        assert dict(found)[f"{name}, packed"] is not None
        assert not runs[f"forward {name}"]
        elsewhere = sum(each == name and way is not None for each, way in found)
        assert runs[f"attach {name}"] == stages + elsewhere
