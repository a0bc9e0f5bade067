"""The costs that processes agree on; limits below what a step needs are refused early, with the least that would do."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rotor_profiling.backends import using
from rotor_py import Checkpointable, InfeasibleError, UnsupportedModelError, estimate
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.simulated_target import prediction_for, world_of
from rotor_py.measure import fixed_memory
from rotor_py.measure.budget import make_budget
from rotor_py.measure.cut import refuse_random_state_of_its_own
from rotor_py.measure.device import limit_bytes, segments_expand, total_bytes
from rotor_py.measure.fixed_memory import unsplit_bytes
from rotor_py.measure.measurement import costliest
from rotor_solver import Chain, Persistent, min_bytes, simulate, store_all
from tests.checkpointable.steps import square
from tests.fields import logged, raises
from tests.solver.strategies import rich_chains, unit_chain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@settings(deadline=None, max_examples=15)  # kernels may have to be compiled
@given(st.lists(rich_chains(), min_size=2, max_size=3), st.floats(0, 1))
def test_a_sequence_takes_no_more_in_any_process_than_in_the_costliest(chains: list[Chain], share: float) -> None:
    length = min(map(len, chains))
    # Gradients that free what a stage behind the cut has left would be refused.
    cut = [tuple(replace(stage, gradient=0) for stage in chain.stages[:length]) for chain in chains]
    chains = [replace(chain, stages=stages) for chain, stages in zip(chains, cut, strict=True)]
    together = costliest(chains)
    least, most = min_bytes(together), simulate(together, store_all(together)).peak
    sequence = Persistent().solve(together, least + int(share * max(0, most - least)))
    found = simulate(together, sequence)
    for chain in chains:
        alone = simulate(chain, sequence)
        assert alone.peak <= found.peak
        assert alone.makespan <= found.makespan + 1e-9


def test_the_least_limit_is_for_a_plan_that_stores_in_part_and_needs_no_snapshots() -> None:
    planned = Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), loss=square)
    (stage,) = (chain := unit_chain(1)).stages
    whole = replace(stage.options[0], saved=10**6)
    parts = replace(stage, options=(whole, replace(whole, forward_time=2.0, saved=10**5)))
    budget = replace(planned.budget, chain=replace(chain, stages=(parts,)), snapshot_bytes=10**5)
    assert budget.peak_bytes(budget.solve(budget.least_bytes(), Persistent())) < 10**6


def test_a_limit_above_all_memory_of_the_device_is_told_once(caplog: Any) -> None:
    total = total_bytes(CPU)
    assert limit_bytes(total, CPU) == total
    assert not caplog.text
    for _ in range(2):
        assert limit_bytes(total + 12345, CPU) == total + 12345
    assert caplog.text.count("is above all memory of cpu") == 1


def test_buckets_that_are_there_when_it_is_measured_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held, sent, batch = 10**6, 3 * 10**5, torch.randn(4, 8)
    monkeypatch.setattr(fixed_memory, "allocated_bytes", lambda device: held)
    planned = Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), batch, loss=square)
    make = partial(make_budget, planned.model, batch, planned.inspection_values, CPU, fresh_gradients=True)
    alone, there, to_come = (
        make(optimizer=None, communication=communication, buckets=buckets).fixed
        for communication, buckets in ((0, False), (sent, True), (sent, False))
    )
    assert there.total == alone.total
    assert to_come.total == alone.total + sent


@pytest.mark.parametrize(
    ("expandable", "expand"), [([], False), ([True, True], True), ([True, False], False), ([False], False)]
)
def test_there_is_room_for_blocks_that_are_not_cut_unless_segments_expand(expandable, expand, monkeypatch) -> None:
    """Some may be older than the setting. Small tensors have segments of their own, whose rests are small."""
    segments = [{"device": 0, "segment_type": "large", "is_expandable": each} for each in expandable]
    segments += [{"device": 0, "segment_type": "small", "is_expandable": False}]
    segments += [{"device": 1, "segment_type": "large", "is_expandable": not expand}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert segments_expand(torch.device("cuda", 0)) == expand
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if expand:
        assert unsplit_bytes(CUDA, 40 * 10**9) == 0
        return
    assert unsplit_bytes(CUDA, 10**6) == 10**4
    assert unsplit_bytes(CUDA, 40 * 10**9) == 8 * 2**20
    assert unsplit_bytes(CPU, 40 * 10**9) == 0
    with using(prediction_for(find_device("h100"))):  # whose allocator is simulated
        assert unsplit_bytes(CUDA, 40 * 10**9) == 0


def test_layers_that_could_not_draw_the_same_numbers_again_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [("0", nn.Linear(8, 8)), ("1", nn.LSTM(8, 8, num_layers=2, dropout=0.1))]
    refuse_random_state_of_its_own(layers, CPU)
    with raises(UnsupportedModelError, "recurrent_dropout", name="1"):
        refuse_random_state_of_its_own(layers, CUDA)
    for harmless in (nn.LSTM(8, 8, num_layers=2), nn.GRU(8, 8), nn.GRU(8, 8, 2, dropout=0.1).eval()):
        refuse_random_state_of_its_own([("0", harmless)], CUDA)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    refuse_random_state_of_its_own(layers, CUDA)


WIDTH = 128


class Unused(nn.Linear):
    """Nothing may run it."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a stage was run")


def unused() -> nn.Module:
    return nn.Sequential(*(Unused(WIDTH, WIDTH) for _ in range(4)))


PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH) * 4
BATCH = 16 * WIDTH * 4


@pytest.mark.parametrize(
    ("fresh", "parts", "least"),
    [
        (False, ("264 kB parameters", "264 kB gradients", "528 kB optimizer state", "8.19 kB batch"), BATCH),
        (True, ("264 kB parameters", "528 kB optimizer state", "264 kB gradients when the optimizer steps"), 0),
    ],
)
def test_the_first_step_is_refused_before_a_stage_is_run(fresh: bool, parts: tuple[str, ...], least: int) -> None:
    model = unused()
    options = {"optimizer": torch.optim.AdamW(model.parameters()), "fresh_grads": fresh, "cache": False}
    network = Checkpointable(model, mem_limit="700kB", **options)
    with raises(InfeasibleError, "limit_below_held") as caught:
        network(torch.randn(16, WIDTH))
    least += 4 * PARAMETERS + 8 * 4  # and a count of steps for each of eight parameters
    assert caught.value.min_bytes == least
    assert caught.value.mem_limit == 700_000
    assert all(part in str(caught.value) for part in (*parts, f"({least} bytes)", "700 kB", "out of memory"))
    assert network.budget is None
    with raises(InfeasibleError, "limit_below_held"):  # at once, if it is made with its input and limit
        Checkpointable(unused(), torch.randn(16, WIDTH), mem_limit="100kB")


def test_a_model_larger_than_the_device_is_refused_without_a_limit_and_of_several_each_holds_its_part() -> None:
    def large() -> nn.Module:
        return nn.Sequential(*(Unused(2**17, 2**17, dtype=torch.bfloat16) for _ in range(3)))  # 103 GB

    with raises(InfeasibleError, "limit_below_held") as caught:
        estimate(large, torch.empty(8, 2**17, dtype=torch.bfloat16, device="meta"), "h100", fresh_grads=True)
    assert caught.value.numbers["min_bytes"] >= 3 * 2**35

    def made() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    batch = torch.randn(4, WIDTH)
    with raises(InfeasibleError, "limit_below_held", mem_limit=200_000) as caught:
        estimate(made, batch, "h100:2", loss=torch.mean, mem_limit="200kB")
    assert caught.value.numbers["min_bytes"] >= 2 * 133_000  # half of the parameters, and of their gradients
    assert estimate(made, batch, "h100:8", loss=torch.mean, mem_limit="67.8MB").fits  # 67.1 MB are for cuBLAS


def test_one_of_several_processes_goes_on_and_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    """Others may measure, and wait for it."""
    with world_of(2):
        network = Checkpointable(unused(), mem_limit="100kB", process_group=dist.group.WORLD)
        network.refuse_what_cannot_fit(torch.randn(16, WIDTH))
    assert logged(caplog, "limit_below_held")


def tied() -> nn.Module:
    """Its first layer is frozen, and its second and third share a weight."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.BatchNorm1d(64), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    model[2].weight = model[1].weight
    return model


FRESH = {"fresh_grads": True}
HOW = [("optimizer", {}), ("optimizer", FRESH), ("step_in_backward", FRESH), ("optimizer", {"forwards_in_flight": 2})]


@pytest.mark.parametrize(("role", "how"), HOW)
def test_nothing_is_refused_that_a_plan_fits(role: str, how: dict[str, Any]) -> None:
    model, value = tied(), torch.randn(16, 64)
    optimizer = torch.optim.Adam(each for each in model.parameters() if each.requires_grad)
    network = Checkpointable(model, value, loss=torch.mean, cache=False, **how, **{role: optimizer})
    least = network.budget.least_bytes()
    network.mem_limit = least
    network.refuse_what_cannot_fit(value)
    network.compute_sequence()
    network.mem_limit = 1
    with pytest.raises(InfeasibleError) as caught:
        network.refuse_what_cannot_fit(value)
    assert least / 3 < caught.value.min_bytes <= least


FEW_ROWS = torch.randn(128, 64)


def wide_blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))


def refusal(limit: int, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        Checkpointable(wide_blocks(), FEW_ROWS, limit, loss=torch.mean, **options)
    return caught.value


def test_a_refusal_says_the_least_limit_of_a_loop_that_frees_gradients() -> None:
    fresh = refusal(1_250_000, fresh_grads=True)
    assert "frees gradients" not in str(fresh)
    said = re.search(r"the least limit is \S+ MB \((\d+) bytes\), and a plan fits", str(refusal(1_500_000)))
    assert int(said[1]) == fresh.min_bytes
    Checkpointable(wide_blocks(), FEW_ROWS, 1_500_000, loss=torch.mean, fresh_grads=True)
    told = str(refusal(1_250_000))
    assert f"({fresh.min_bytes} bytes), still above the limit" in told
    assert " Try a smaller batch, or a limit of " in told
    # Several forwards need the gradients in any case.
    assert "frees gradients" not in str(refusal(1_500_000, forwards_in_flight=2))


def test_a_refusal_before_measuring_speaks_of_freed_gradients_only_where_what_is_known_would_fit() -> None:
    """With all gradients there when the optimizer steps, only the batch may be gone."""
    model = wide_blocks()
    held = 4 * sum(each.numel() for each in model.parameters()) * 4
    for limit, told in ((held + 10_000, True), (held - 10_000, False)):
        network = Checkpointable(model, mem_limit=limit, optimizer=torch.optim.AdamW(model.parameters()))
        with raises(InfeasibleError, "limit_below_held") as caught:
            network(FEW_ROWS)
        assert ("frees gradients" in str(caught.value)) == told
