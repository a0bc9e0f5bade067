"""A graph that is compiled as a whole: inside the limit, in at most two attempts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rotor_py import Checkpointable
from rotor_py.capture.variants import CompileBudget
from rotor_py.measure.measurement import Measurement
from rotor_solver import store_all
from tests.checkpointable.steps import square as loss
from tests.compile.network import ROWS, Compilations, Net, Wide, batch, measured, peak, results, share_of, whole
from tests.execute.test_moving import same
from tests.fields import logged
from tests.quick import run_python


@pytest.fixture(scope="module")
def free() -> Checkpointable:
    return whole("1GB", make=Wide)


def test_the_graph_is_one_compiled_stage_inside_the_limit(free: Checkpointable) -> None:
    limit = share_of(free, 0.9)
    tight = whole(limit, make=Wide)
    for found in (free, tight):
        assert len(found.names) == 1
        assert found.compiled == found.names
        assert len(found._planner.in_use.ways) == 2  # and plain: its stages are not compiled beside it
    assert measured(tight, batch(ROWS)) <= peak(tight) <= limit < peak(free)


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vectors have one width here")
def test_code_in_a_cache_on_disk_is_not_run_with_wider_vectors_than_it_was_made_for(tmp_path: Path) -> None:
    """Inductor's key lacks their width, and a loop made for 8 numbers at a time then writes 16 at its end."""
    script = "from tests.compile.network import *; print(float(whole('1GB', make=Wide)(batch(ROWS)).sum()))"
    made = []
    for capability in ("avx2", "avx512"):
        run = run_python(script, ATEN_CPU_CAPABILITY=capability, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        made.append(float(run.stdout))
    assert made[0] == pytest.approx(made[1], rel=1e-3)


@pytest.mark.slow
def test_it_leaves_room_for_a_large_loss_also_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def large(output: torch.Tensor) -> torch.Tensor:
        return output.repeat(1, 8).exp().mean()

    free = whole("1GB", large, Wide, 1)
    chain = replace(free.budget.chain, loss_temp=0)
    assert peak(free) > replace(free.budget, chain=chain).peak_bytes(store_all(chain))
    compilations = Compilations(monkeypatch)
    limit = peak(free) - batch(ROWS).nbytes
    tight = whole(limit, large, Wide, 1)
    assert len(tight.names) == 1
    assert compilations.count == 1  # it was known before, not found out
    assert 0.98 * peak(tight) <= measured(tight, batch(ROWS), large) <= peak(tight) <= limit

    tight.save_plan(tmp_path / "plan.json")
    again = Checkpointable(Wide(1), plan=tmp_path / "plan.json", granularity=2)
    assert json.loads((tmp_path / "plan.json").read_text())["compiled"]["room"] > 0
    assert measured(again, batch(ROWS), large) <= limit
    assert len(again.compiled) == 1
    again.model.load_state_dict(tight.model.state_dict())
    assert same(results(again, again.sequence, batch(ROWS)), results(tight, tight.sequence, batch(ROWS)))


class Attempts:
    """Partitions compiled by a stand-in for Inductor, each of which takes a given share of the room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
        self.saved: list[int] = []

        def taken(room: CompileBudget, found: Measurement) -> int:
            if len(found.stages) > 1:
                return room.available + 1  # plain, nothing fits
            size = found.stages[0].saved_bytes
            self.saved += [] if size in self.saved else [size]
            return int(shares[self.saved.index(size)] * room.available)

        monkeypatch.setattr(CompileBudget, "taken", taken)
        monkeypatch.setattr("rotor_py.capture.variants._stage_by_stage", lambda *_: [])


@pytest.mark.parametrize(
    ("shares", "kept"),
    [
        # Fused more than its graph shows: a faster one fits.
        pytest.param((0.6, 0.95), 1, marks=pytest.mark.slow),
        ((1.04, 0.98), 1),  # with buffers of its own: one with less room fits
        pytest.param((1.04, 1.02), None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("without_inductor")
def test_one_more_partition_at_most_is_compiled_with_the_room_the_first_shows(monkeypatch, free, shares, kept) -> None:
    attempts = Attempts(monkeypatch, *shares)
    found = whole(share_of(free, 0.9), make=Wide)
    assert len(attempts.saved) == len(shares)
    assert attempts.saved == sorted(attempts.saved, reverse=shares[0] > 1)
    assert bool(found.compiled) == (kept is not None)
    if kept is not None:
        assert found._planner.in_use.ways[0].measurement.stages[0].saved_bytes == attempts.saved[kept]


@pytest.mark.slow
def test_an_optimizer_that_comes_late_has_it_compiled_for_the_room_that_is_left() -> None:
    """Adam's state takes as much again as all parameters, twice."""
    torch.manual_seed(0)
    limit = peak(whole("1GB")) * 11 // 10
    found = Checkpointable(Net(2), mem_limit=limit, compile=True, loss=loss, fresh_grads=True, granularity=2)
    optimizer = torch.optim.Adam(found.parameters())
    saved = []
    for _ in range(3):
        optimizer.zero_grad()
        loss(found(batch(ROWS))).backward()
        plan = found._planner.in_use
        assert len(plan.ways[0].cut.stages) == 1
        saved.append(plan.ways[0].measurement.stages[0].saved_bytes)
        optimizer.step()
    budget = plan.budget_of(plan.ways[0])
    assert budget.peak_bytes(store_all(budget.chain)) <= limit
    assert saved[0] > saved[1] == saved[2]


@pytest.mark.usefixtures("without_inductor")
def test_where_it_cannot_be_compiled_whole_the_stages_are_compiled(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CompileBudget, "available", property(lambda room: 1))  # no partition fits
        found = whole("1GB", make=Wide)
    assert len(found.names) == 2
    assert found.compiled
    assert not logged(caplog, "not_compiled")
    Compilations(monkeypatch, failing=range(1))
    found = whole("1GB", make=Wide)
    assert len(found.names) == 2
    assert found.compiled
    assert logged(caplog, "not_compiled", name="the graph as a whole")


@pytest.mark.usefixtures("without_inductor")
def test_what_does_not_fit_after_all_is_not_compiled_in_every_step(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    plain = Checkpointable(Wide(2), batch(ROWS), "1GB", loss=loss, fresh_grads=True, granularity=2)
    plain.compute_sequence()
    roomy = CompileBudget.partitioner
    monkeypatch.setattr(CompileBudget, "partitioner", lambda room, _: roomy(room, 10**12))
    monkeypatch.setattr(CompileBudget, "taken", lambda *_: 0)  # as if all beside the graph were overlooked
    torch.manual_seed(0)
    limit = share_of(plain, 0.7)
    found = Checkpointable(Wide(2), mem_limit=limit, compile=True, loss=loss, fresh_grads=True, granularity=2)
    for _ in range(3):
        found.zero_grad()
        loss(found(batch(ROWS))).backward()
    assert len(found.names) > 1
    assert not logged(caplog, "planning_again")
