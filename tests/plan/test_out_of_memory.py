"""`on_oom="replan"`: what runs out of memory is undone, and runs again by a plan that needs less."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError
from rotor_py.plan import oom_replanning
from rotor_py.stage.error_context import asked_bytes, is_out_of_memory
from tests.checkpointable.steps import Applies, Made, Residual, between, blocks, images, planned_at, square, step_peak
from tests.execute import starved
from tests.execute.starved import AtOperators, Capacity, Gated, notes, out_of_memory, planned, state, step
from tests.fields import Noted, logged
from tests.training.loop import differences, rows
from tests.training.tripping import chain as dropping

Kind = Callable[[], nn.Module]


def test_a_device_that_is_too_small_trains_inside_it(caplog) -> None:
    start, batch = blocks(6, 16), images(8, 16)
    network = Checkpointable(copy.deepcopy(start), batch, "1GB", loss=square, fresh_grads=True, on_oom="replan")
    plain = copy.deepcopy(start)
    with Capacity() as roomy:
        step(plain, batch=batch)
    for share, tries in ((0.75, 2), (0.4, 3)):
        network.zero_grad()
        network.load_state_dict(start.state_dict())
        network.compute_sequence("1GB")
        caplog.clear()
        with Capacity(share * roomy.peak) as device:
            step(network, batch=batch)
        assert device.errors == tries
        assert not differences(state(network), state(plain))
        records = logged(caplog, "out_of_memory")
        assert [record.__dict__["numbers"]["tries"] for record in records] == [i + 1 for i in range(tries)]
        with Capacity(share * roomy.peak) as device:
            step(network, batch=batch)  # the next step follows the smaller plan from the start
        assert device.errors == 0
    network.zero_grad()
    with Capacity(0.2 * roomy.peak), raises_noted("this again: no plan needs less memory than the one in use"):
        step(network, batch=batch)
    for each in (network, plain):
        each.zero_grad()
        each.load_state_dict(start.state_dict())
        step(each, batch=batch)
    assert not differences(state(network), state(plain))


@contextmanager
def raises_noted(why: str) -> Iterator[None]:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        yield
    assert why in notes(caught.value)


def pinched() -> nn.Sequential:
    """In plain training the gradient of the second layer's output is gone when the largest ones inside are made."""
    pinch = nn.Sequential(nn.Linear(4, 256), nn.GELU(), nn.Linear(256, 4), nn.Linear(4, 256))
    return nn.Sequential(nn.Linear(12, 4), Applies(function=pinch), nn.Linear(256, 1))


@pytest.mark.parametrize(("kind", "share"), [(blocks, 0.0), (pinched, 0.0), (pinched, 1.0), (Gated, 0.0)])
def test_a_step_takes_what_is_predicted_and_no_more_than_the_limit(kind: Kind, share: float) -> None:
    batch = images(8, 16) if kind is blocks else rows(count=512)
    network = planned_at(share, kind(), batch, fresh_grads=True, on_oom="replan")
    step_peak(network, batch, fresh_grads=True)  # the first capture
    peak = step_peak(network, batch, fresh_grads=True)
    assert peak <= network.mem_limit
    # Of captured models, what a stage needs when it is run again is an upper bound.
    assert peak >= (0.85 if kind is Gated else 0.98) * network.budget.peak_bytes(network.sequence)


@dataclass
class Fault:
    """Where a stage is to run out of memory."""

    where: Noted
    device: Capacity | None = None


class Once(Made):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        keeps = value * 2  # what the frame of an error's traceback would keep
        self.run_out("forward")
        made = torch.tanh(keeps)
        if made.requires_grad:
            made.register_hook(lambda _: self.run_out("backward"))
        return made

    def run_out(self, where: str) -> None:
        if where in self.fault.where:
            self.fault.where.clear()
            if self.fault.device is not None:
                self.fault.device.peak = 0
            raise out_of_memory()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_the_failed_run_held_is_free_when_the_next_one_begins(where: str) -> None:
    count, width = 64, 128
    unit = count * width * 4
    probe, once, device, held = nn.Linear(width, width, bias=False), Once(fault=Fault(Noted())), Capacity(), Noted()
    probe.register_forward_pre_hook(lambda *_: held.append(device.held))
    layers = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(5)]
    batch = torch.randn(count, width)
    network = planned_at(1.0, nn.Sequential(probe, *layers, once, nn.Tanh()), batch, on_oom="replan")
    step(network, batch=batch)
    network.zero_grad(set_to_none=False)
    held.clear()
    once.fault.where.append(where)
    with device:
        square(network(batch)).backward()
    assert held[0] == 0
    # The output, its gradient's scalars, and the gradient that has come to the stage: no stage's ā.
    assert held[1] <= (0 if where == "forward" else 3 * unit + 64)
    assert device.peak > 6 * unit


@pytest.mark.parametrize("later", [1, 4])
def test_the_rest_of_a_backward_stays_inside_the_smaller_limit(later: int, caplog) -> None:
    """The output, the gradients of later stages and the one that has arrived are there beside it."""
    once, batch = Once(fault=Fault(Noted())), torch.randn(96, 128)
    layers = [Residual(nn.Linear(128, 128), nn.Tanh(), nn.GELU()) for _ in range(9)]
    model = nn.Sequential(*layers[later:], once, *layers[:later])
    network = planned_at(1.0, model, batch, fresh_grads=True, on_oom="replan")
    step(network, batch=batch)
    network.zero_grad()
    with Capacity() as device:
        once.fault = Fault(Noted(["backward"]), device)
        step(network, batch=batch)
    (record,) = logged(caplog, "out_of_memory")
    assert device.peak + network.budget.fixed.total + batch.nbytes <= record.__dict__["numbers"]["limit"]


WRITTEN = "has not run this again: the input or a parameter was written to"


@pytest.mark.parametrize(
    "change",
    [lambda network, batch: nn.init.ones_(network.model[1].weight), lambda network, batch: nn.init.ones_(batch)],
)
def test_a_backward_that_cannot_be_exact_is_not_tried(change: Callable[..., None]) -> None:
    network, batch = planned(nn.Sequential(nn.Identity(), *dropping())), rows()
    loss, sequence = square(network(batch.requires_grad_())), network.sequence
    change(network, batch)
    with AtOperators(4).inside_stages(), raises_noted(WRITTEN):
        loss.backward()
    assert network.sequence is sequence
    network.train()
    plain = copy.deepcopy(network.model)
    for each in (network, plain):
        each.zero_grad()
        step(each)
    assert not differences(state(network), state(plain))


def test_a_stage_with_hooks_on_gradients_is_not_run_again() -> None:
    model = dropping()
    model[-2].register_full_backward_hook(lambda *_: None)
    network = planned(model)
    found = []
    for at in (1, 2, 4, 20):
        network.compute_sequence(network.mem_limit)
        loss, note = square(network(rows())), ""
        try:
            with AtOperators(at).inside_stages():
                loss.backward()
        except torch.OutOfMemoryError as error:
            note = error.__notes__[-1].partition(": ")[2]
        found.append(note)
    assert f"stage {network.names[-2]!r} has hooks on gradients, which may have been called" in found
    assert "" in found


class Late(nn.Linear):
    """Before the chain it fails; in a stage it changes a buffer."""

    late = ""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.late == "fails":
            raise out_of_memory()
        if self.late == "counts":
            self.count.add_(1)
        return super().forward(value)


def test_a_buffer_that_changes_for_the_first_time_is_not_undone() -> None:
    network = planned(nn.Sequential(Late(), *dropping()))
    network.model[0].late = "counts"
    with AtOperators(5).inside_stages(), raises_noted("buffer 'count' has changed for the first time"):
        network(rows())


def test_an_error_outside_of_the_stages_is_told_of_and_one_in_the_users_loss_is_the_users_own() -> None:
    network = planned(nn.Sequential(Late().requires_grad_(False), *dropping()))
    sequence, output = network.sequence, network(rows())
    with Capacity(1), pytest.raises(torch.OutOfMemoryError) as caught:
        square(output)
    assert not getattr(caught.value, "__notes__", [])
    network.model[0].late = "fails"
    with raises_noted("the error came from outside of the planned stages"):
        network(rows())
    assert network.sequence is sequence


def test_second_derivatives_are_refused() -> None:
    network = planned(dropping())
    with pytest.raises(RuntimeError, match="leave on_oom out"):
        torch.autograd.grad(square(network(rows())), list(network.parameters()), create_graph=True)


@pytest.mark.parametrize("make", [out_of_memory, starved.out_of_cpu_memory])
def test_the_limit_is_smaller_by_what_was_asked_for_or_a_share(make: Any, caplog) -> None:
    network = planned(dropping())
    for asked, share in ((10, 1 / 8), (60_000, None)):
        network.compute_sequence(network.mem_limit)
        before = network.budget.peak_bytes(network.sequence)
        caplog.clear()
        with AtOperators(1, error=lambda asked=asked: make(asked)).inside_stages():
            step(network)
        least = before - (int(share * before) if share else int(0.95 * asked))
        assert network.budget.peak_bytes(network.sequence) <= least
        assert len(caplog.records) == 1
        assert logged(caplog, "out_of_memory", name="forward", needed=before, tries=1)


def test_on_cuda_the_limit_is_what_was_allocated_until_a_limit_is_set_again(monkeypatch) -> None:
    network = planned(dropping())
    limit, sequence, enough = network.mem_limit, str(network.sequence), between(network, 0.3)
    monkeypatch.setattr(oom_replanning, "allocated_bytes", lambda device: enough)
    with AtOperators(1).inside_stages():
        step(network)
    assert network.budget.peak_bytes(network.sequence) <= enough
    assert network.mem_limit == limit
    assert str(network.compute_sequence()) == str(network.sequence) != sequence
    assert str(network.compute_sequence(limit)) == sequence


def test_an_out_of_memory_error_of_this_machine_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == 2**62
    assert asked_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")) == 2.5 * 2**30
    assert asked_bytes(torch.OutOfMemoryError("no")) == 0
    assert not is_out_of_memory(InfeasibleError("it would run out of memory", min_bytes=2, mem_limit=1))
    assert not is_out_of_memory(MemoryError())


def test_a_copy_replans_and_other_kinds_of_steps_keep_their_plans() -> None:
    network, found = copy.deepcopy(planned(dropping())), []
    for trains, at in ((True, 0), (False, 0), (True, 9), (False, 0), (True, 0)):
        network.model[0].weight.requires_grad_(trains)
        with AtOperators(at).inside_stages() as mode:
            step(network)
        assert mode.errors == bool(at)
        found.append(str(network.sequence))
    whole, frozen, smaller, *later = found
    assert whole != smaller
    assert later == [frozen, smaller]


def test_plan_files_serve_with_and_without_replanning(tmp_path: Path) -> None:
    start = Gated()
    network = planned(start, 0.8)
    network.save_plan(tmp_path / "plan.json")
    plain = Checkpointable(copy.deepcopy(start), plan=tmp_path / "plan.json", loss=square)
    loaded = Checkpointable(copy.deepcopy(start), plan=tmp_path / "plan.json", loss=square, on_oom="replan")
    step(plain)
    step(loaded)
    with AtOperators(9).inside_stages(), pytest.raises(torch.OutOfMemoryError) as caught:
        step(plain)  # it is off by default
    assert "on_oom" not in notes(caught.value)
    assert str(plain.sequence) == str(loaded.sequence) == str(network.sequence)
    loaded.zero_grad()
    loaded.load_state_dict(start.state_dict())
    with AtOperators(9).inside_stages() as mode:
        step(loaded)
    assert mode.errors == 1
    step(start)
    assert not differences(state(loaded), state(start))
    assert str(loaded.sequence) != str(network.sequence)
    loaded.save_plan(tmp_path / "smaller.json")
    again = Checkpointable(copy.deepcopy(start), plan=tmp_path / "smaller.json")
    assert str(again.sequence) == str(loaded.sequence)


@pytest.mark.gpu
def test_a_cuda_device_that_is_too_small_trains_inside_it(cuda) -> None:
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
    start, batch = nn.Sequential(*layers).to(cuda), torch.randn(8192, 1024, device=cuda)
    plain = copy.deepcopy(start)
    step(plain, batch=batch)
    expected = {**state(plain), "cuda": torch.cuda.get_rng_state(cuda)}
    del plain
    network = planned_at(1.0, copy.deepcopy(start), batch, fresh_grads=True, on_oom="replan")
    full, least = network.mem_limit, network.budget.least_bytes()
    total = torch.cuda.get_device_properties(cuda).total_memory
    for share in (0.8, 0.5, 0.3):
        network.zero_grad()
        network.load_state_dict(start.state_dict())
        network.compute_sequence(full)
        torch.cuda.empty_cache()
        # Blocks that the allocator has cut cannot always be joined again: a tenth more than the bytes.
        torch.cuda.set_per_process_memory_fraction(1.1 * (least + share * (full - least)) / total, cuda)
        try:
            sequence = str(network.sequence)
            step(network, batch=batch)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, cuda)
        assert str(network.sequence) != sequence
        assert not differences({**state(network), "cuda": torch.cuda.get_rng_state(cuda)}, expected)
