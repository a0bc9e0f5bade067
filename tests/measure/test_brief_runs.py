"""Ways of a stage that are measured in training's graph alone, or not at all: the bytes are those of all runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rotor_profiling import memory
from rotor_profiling.stage import cost
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


class Heavy(nn.Module):
    """The gradients of its parameters are larger than all that it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 32 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.inner(x[:, :1]).exp().sin()).unflatten(-1, (4, -1)).mean(-2)
        return x + self.outer(y)


class Padded(nn.Module):
    """The gradient of its parameter is a part of a larger one, which a parameter copies, and a graph of its own keeps.

    Packed, it needs the most at the end of its backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pad = nn.Linear(8 * WIDTH, WIDTH - 1), nn.Parameter(torch.randn(4, 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.pad, self.inner(x.repeat(1, 1, 8)) * 2.0], -1)
        for _ in range(16):
            y = F.dropout(F.relu(y), 0.1)
        return y


class LookedUp(nn.Module):
    """The gradient of its table is sparse. Packed, it needs the most at the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(8 * WIDTH, WIDTH), nn.Embedding(50, WIDTH, sparse=True)
        self.register_buffer("ids", torch.arange(32).view(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.repeat(1, 1, 8)) + self.table(self.ids) * 2.0
        for _ in range(16):
            y = F.dropout(F.relu(y), 0.1)
        return y


class Scattered(nn.Module):
    """The gradient of its output is held on to by some of its parts, and not by others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.inner(x).chunk(2, -1)
        return torch.cat([x + F.gelu(left).exp(), self.outer(right.sigmoid()) * x], -1)[..., WIDTH // 2 : -WIDTH // 2]


class Deciding(nn.Module):
    """What it has decided in its first run is kept for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest, where = self.inner(x).topk(WIDTH // 2, -1)
        return x + self.outer(torch.zeros_like(x).scatter(-1, where, F.gelu(largest)))


class Doubled(nn.Module):
    """Twice as long, so its output's gradient is larger than anything that it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool1d(F.silu(self.conv(F.interpolate(x, scale_factor=2.0))), 2)


def measured(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch, *, briefly: bool, fresh: bool = True
) -> tuple[Ways, Counter[str]]:
    """What measuring finds of two such layers, captured, in each way; and the runs of each kind that this took."""
    torch.manual_seed(0)
    found: Ways = []
    runs: Counter[str] = Counter()
    measure_ways = stage_measurer.measure_ways

    def noting(runners: Any, value: Any, context: Any, watch: Any = None, stand_ins: Any = None) -> Any:
        given = stand_ins if briefly else {}
        with monkeypatch.context() as counted:
            for name in ("forward", "attach", "first"):
                run = getattr(StageRunner, name)

                def counting(runner: StageRunner, *args: Any, run: Any = run, name: str = name, **more: Any) -> Any:
                    runs[f"{name} {runner._way}"] += 1
                    return run(runner, *args, **more)

                counted.setattr(StageRunner, name, counting)
            if not briefly:
                counted.setattr(cost, "beyond_training", lambda *_: None)
                counted.setattr(StageRunner, "before_first", lambda *_: None)
            made = measure_ways(runners, value, context, watch, given)
        found.extend((runner._way, way) for runner, way in zip(runners, made.bytes, strict=True))
        return made

    with monkeypatch.context() as noted:
        noted.setattr(stage_measurer, "measure_ways", noting)
        layers = layer, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # Captured, a layer that hands a single tensor from operator to operator would be cut into several stages.
        chain = isinstance(layer, Padded | LookedUp)
        options: dict[str, Any] = {} if chain else {"granularity": 3}
        model = Checkpointable(
            nn.Sequential(*layers) if chain else Stack(*layers),
            loss=torch.sum,
            cache=False,
            fresh_grads=fresh,
            **options,
        )
        model.measure(torch.randn(4, 8, WIDTH))
    return found, runs


ALSO_ADDED = [Convolutions, Heavy, Padded, LookedUp]
"""Layers for which it matters whether gradients add up."""
LAYERS = [*ALSO_ADDED, Gated, NewGelu, Attention, NormedDropout, Scattered, Doubled, Deciding]


@pytest.mark.parametrize(
    ("layer", "fresh"), [*((layer, True) for layer in LAYERS), *((layer, False) for layer in ALSO_ADDED)]
)
def test_bytes_are_those_of_runs_in_both_graphs(
    layer: type[nn.Module], fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made = layer()
    full, runs = measured(made, monkeypatch, briefly=False, fresh=fresh)
    brief, fewer = measured(made, monkeypatch, briefly=True, fresh=fresh)
    assert [name for name, _ in brief] == [name for name, _ in full]
    assert len(full) > 2
    for (name, few), (_, all_of_them) in zip(brief, full, strict=True):
        if few is not None:
            # All buffers are copied in the first run of all, and in a second one those that were seen to move. And
            # operators that are watched, for what they decide, make tensors of scalars.
            more = few.nograd_temp_bytes - all_of_them.nograd_temp_bytes
            assert 0 <= more <= 16 + sum(each.nbytes for each in made.buffers())
            # A copy of the gradient is there beside the whole that it is a part of: that is never too little.
            copied = few.replay_temp_bytes - all_of_them.replay_temp_bytes
            assert 0 <= copied <= (made.pad.nbytes if isinstance(made, Padded) and fresh else 0), name
            rest = [replace(each, nograd_temp_bytes=0, replay_temp_bytes=0) for each in (few, all_of_them)]
            assert rest[0] == rest[1], name
    assert sum(fewer.values()) < sum(runs.values())
    assert (fewer["first None"] > 0) == (layer is Deciding)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("layer", "fewer"), [(Gated, True), (Convolutions, True), (Heavy, True), (LookedUp, False), (Deciding, False)]
)
def test_a_way_is_run_in_a_graph_of_its_own_only_where_that_shows_more(
    layer: type[nn.Module], fewer: bool, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runs = measured(layer(), monkeypatch, briefly=True, fresh=fresh)
    ways = {name.removeprefix("forward ") for name in runs if name.startswith("forward ")} - {"None"}
    assert ways
    for way in ways:
        assert (runs[f"attach {way}"] < runs[f"forward {way}"]) == fewer, way


def test_a_way_that_another_one_stands_in_for_is_run_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, runs = measured(NewGelu(), monkeypatch, briefly=True)
    left_out = Counter(name for name, way in found if way is None)
    assert left_out
    for name, stages in left_out.items():
        assert dict(found)[f"{name}, packed"] is not None
        elsewhere = sum(each == name and way is not None for each, way in found)
        assert runs[f"forward {name}"] == elsewhere
        assert runs[f"attach {name}"] == stages


def test_where_no_meter_sees_what_is_freed_each_way_is_run_in_both_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    split = memory._split

    def as_on_cuda(events: list[tuple[int, str, int, int]]) -> Any:
        phases, curve = split(events)
        return {name: replace(phase, peak_with_held=None) for name, phase in phases.items()}, curve

    monkeypatch.setattr(memory, "_split", as_on_cuda)
    _, runs = measured(Gated(), monkeypatch, briefly=True)
    ways = {name.removeprefix("forward ") for name in runs if name.startswith("forward ")} - {"None"}
    assert ways
    assert all(runs[f"attach {way}"] >= runs[f"forward {way}"] for way in ways)
