"""The costs that processes agree on: a sequence that fits them fits each of the processes."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rotor_profiling.backends import using
from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.simulated_target import prediction_for
from rotor_py.measure import fixed_memory
from rotor_py.measure.budget import make_budget
from rotor_py.measure.cut import refuse_random_state_of_its_own
from rotor_py.measure.device import limit_bytes, segments_expand, total_bytes
from rotor_py.measure.fixed_memory import unsplit_bytes
from rotor_py.measure.measurement import costliest
from rotor_solver import Chain, Persistent, min_bytes, simulate, store_all
from tests.checkpointable.steps import square
from tests.fields import raises
from tests.solver.strategies import rich_chains, unit_chain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@settings(deadline=None, max_examples=30)  # kernels may have to be compiled
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


def test_equal_costs_are_those_of_all_and_an_option_that_one_process_lacks_is_left_out() -> None:
    chain = unit_chain(2)
    assert costliest([chain, unit_chain(2)]) is chain
    first = chain.stages[0]
    more = replace(chain, stages=(replace(first, options=first.options * 2), *chain.stages[1:]))
    assert [len(stage.options) for stage in costliest([more, chain]).stages] == [1, 1]


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
def test_there_is_room_for_blocks_that_the_allocator_does_not_cut_unless_its_segments_expand(
    expandable: list[bool], expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
