"""Steps are watched: a loss outside that was not declared is planned for, once, and named in one line of the log."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import _profiler_enabled as listening
from torch.utils.checkpoint import checkpoint

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, Plan
from rotor_py.errors import InvalidStateError
from rotor_py.plan.observers import watched_steps
from rotor_py.validate.verification import verify
from tests.checkpointable.steps import CPU, Made, Residual, planned_at, said_in, same_gradients, without_collector
from tests.fields import kinds, logged, raises
from tests.training.test_concurrent import in_threads

VOCABULARY = 1024
WORDS = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(0))
ROW = torch.ones(1, 256)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Residual(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), *blocks, nn.Linear(32, VOCABULARY))


class Captured(Made):
    """The same, but no chain: TorchDynamo captures it. It returns a dict, with tensors beside the logits."""

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        value = self.layers[:-1](words)
        return {"logits": self.layers[-1](value), "means": value.mean(-1)}


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": lambda: Captured(layers=chain())}


def loss(output: Any) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits.flatten(0, 1), WORDS.flatten())


def planned_for(kind: str = "chain", share: float = 1.0, **options: Any) -> Checkpointable:
    """With a limit `share` of the way to storing everything, as far as the planner knows."""
    return planned_at(share, MODELS[kind](), WORDS, **{"loss": None, "fresh_grads": True, **options})


@cache
def plan_of_chain() -> Plan:
    return planned_for().plan()


def linear(**options: Any) -> Checkpointable:
    """Parameters, and so gradients, are most of what it takes."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters()) if options.get("fresh_grads") else None
    return planned_at(1.0, model, ROW, loss=None, optimizer=optimizer, **options)


def step(planned: nn.Module) -> None:
    planned.zero_grad()
    output = planned(WORDS)
    loss(output).backward()


def lean_step(planned: nn.Module) -> None:
    planned.zero_grad()
    loss(planned(WORDS)).backward()


def peak_of(planned: nn.Module, step: Callable[[nn.Module], None] = step) -> int:
    planned.zero_grad()
    return measured_peak(lambda: step(planned), [*planned.parameters(), WORDS], CPU)


@pytest.mark.parametrize(("kind", "step"), [("chain", step), ("captured", lean_step)])
def test_a_loss_outside_is_planned_for_after_the_first_step(kind: str, step, caplog) -> None:
    planned = planned_for(kind)
    limit = planned.mem_limit
    assert peak_of(planned, step) > limit  # a meter is a profiler, and that goes first: the step was not watched
    assert said_in(caplog) == []
    step(planned)
    (said,) = said_in(caplog)
    assert logged(caplog, "over_limit", mem_limit=limit, goes_on=False)
    peak = peak_of(planned, step)
    assert peak <= planned.budget.peak_bytes(planned.sequence) <= limit
    assert peak >= 0.95 * planned.budget.peak_bytes(planned.sequence)
    step(planned)
    assert said_in(caplog) == [said]
    if kind == "chain":
        temp = int(said.partition("pass it as loss=, or loss_tmp_memory_usage=")[2].partition(",")[0])
        for options in ({"loss_tmp_memory_usage": temp}, {"loss": loss}):  # as the line says
            told = Checkpointable(chain(), WORDS, limit, fresh_grads=True, **options)
            before = told.budget
            assert peak_of(told) <= limit
            step(told)
            assert before.chain == told.budget.chain
            assert said_in(caplog) == [said]
        step(
            Checkpointable(chain(), WORDS, limit, fresh_grads=True, loss=torch.Tensor.sum)
        )  # another loss than the step's
        assert f"give instead loss_tmp_memory_usage={temp}" in said_in(caplog)[1]
        twin = copy.deepcopy(planned)  # it is watched by itself
        step(twin)
        assert peak_of(twin) <= limit


def test_a_step_inside_the_limit_says_nothing_and_its_loss_counts(caplog) -> None:
    planned = planned_for()
    planned.compute_sequence("1GB")
    sequence, before = planned.sequence, planned.budget.peak_bytes(planned.sequence)
    step(planned)
    assert said_in(caplog) == []
    assert planned.sequence is sequence
    assert before < peak_of(planned) <= planned.budget.peak_bytes(sequence)
    # An optimizer that comes now is planned for beside the loss: its own step never goes over.
    planned.mem_limit = planned.budget.peak_bytes(sequence) + 1000
    optimizer = torch.optim.AdamW(planned.parameters())
    step(planned)
    optimizer.step()
    assert planned.sequence is not sequence
    state = [entry for each in optimizer.state.values() for entry in each.values()]
    planned.zero_grad()
    assert measured_peak(lambda: step(planned), [*planned.parameters(), *state, WORDS], CPU) <= planned.mem_limit
    step(planned)
    assert said_in(caplog) == []


@pytest.mark.parametrize("case", ["no room", "by hand", "from a file"])
def test_where_no_other_plan_will_do_training_goes_on_and_a_warning_says_so(case: str, caplog) -> None:
    planned = planned_for(share=float(case != "no room"), every_n_layers=2 if case == "by hand" else None)
    if case == "from a file":
        planned = Checkpointable(chain(), mem_limit=planned.mem_limit, fresh_grads=True, plan=planned.plan())
    sequence = planned.sequence
    for _ in range(3):
        step(planned)
    (record,) = logged(caplog, "over_limit", goes_on=True)
    assert [record.getMessage()] == said_in(caplog)
    assert f"{planned.budget.least_bytes()} bytes" in record.getMessage() or case != "no room"
    assert planned.sequence is sequence


def test_only_the_first_step_by_a_plan_is_watched_unless_all_or_none_are_asked_for(caplog) -> None:
    for watch in (None, True):
        caplog.clear()
        planned = planned_for(loss=lambda output: output.mean(), watch=watch)
        planned(WORDS).mean().backward()
        step(planned)
        assert len(said_in(caplog)) == bool(watch)
        assert (peak_of(planned) > planned.mem_limit) is (watch is None)
    caplog.clear()
    planned = planned_for(watch=False)
    sequence = planned.sequence
    step(planned)
    assert said_in(caplog) == []
    assert planned.inspection_values.loss.temp_bytes == 0
    planned.watch = None
    (found,) = verify(planned, WORDS, loss=loss, fresh_grads=True)  # which does not change a plan
    assert found.measured_peak_bytes > planned.mem_limit
    assert planned.sequence is sequence
    assert said_in(caplog) == []
    step(planned)
    assert len(said_in(caplog)) == 1
    assert planned.sequence is not sequence


def test_a_step_over_the_limit_after_a_new_plan_is_warned_of_once_more(caplog) -> None:
    planned = planned_for(watch=True)
    step(planned)
    sequence = planned.sequence
    for _ in range(3):
        planned.zero_grad()
        output = planned(WORDS)
        extra = [output.detach().clone() for _ in range(4)]
        loss(output).backward()
    del extra
    assert kinds(caplog) == ["over_limit"] * 2
    assert len(logged(caplog, "over_limit", goes_on=False)) == 1
    assert planned.sequence is sequence


def test_outputs_of_earlier_steps_hide_nothing_and_gradients_freed_after_the_forward_count_once(caplog) -> None:
    planned, output = planned_for(loss=loss, watch=True), None
    for number in range(2):  # the output of one step is let go of in the next one, after its forward
        planned.zero_grad()
        output = planned(WORDS)
        extra = torch.zeros(output.numel() // 2 * number)
        loss(output).backward()
        del extra
        assert len(said_in(caplog)) == number
    planned = linear(watch=False)
    for _ in range(3):
        output = planned(ROW)
        planned.zero_grad()
        output.mean().backward()
        planned.watch = True
    assert len(said_in(caplog)) == 1


def test_a_first_step_counts_the_optimizer_state_that_later_ones_find(caplog) -> None:
    planned = linear(fresh_grads=True)
    state = planned.budget.fixed.optimizer
    held: list[torch.Tensor] = []
    planned[0].weight.register_hook(lambda gradient: held.append(torch.zeros(state // 5)))
    planned(ROW).mean().backward()
    (record,) = logged(caplog, "over_limit")
    assert record.__dict__["numbers"]["other_bytes"] > 0
    assert held[0].nbytes < state  # there was room for it in this step


def failing_backward(planned: Checkpointable) -> None:
    output = planned(WORDS)
    output.register_hook(lambda gradient: 1 / 0)
    loss(output).backward()


def backward_in_a_thread(planned: Checkpointable) -> None:
    value = loss(planned(WORDS))
    in_threads(value.backward)
    del value
    planned(WORDS)  # here the thread of the forward comes by again


ENDINGS: dict[str, tuple[Callable[[Checkpointable], Any], type[Exception] | None]] = {
    "step": (step, None),
    "dropped": (lambda planned: planned(WORDS), None),
    "loss": (lambda planned: nn.functional.cross_entropy(planned(WORDS).flatten(0, 1), WORDS), ValueError),
    "forward": (lambda planned: planned(WORDS + VOCABULARY), IndexError),
    "backward": (failing_backward, ZeroDivisionError),
    "grad": (lambda planned: torch.autograd.grad(loss(planned(WORDS)), list(planned.parameters())), None),
    # A second forward runs inside of the engine, where no watch can be stopped.
    "recomputed": (lambda planned: loss(checkpoint(planned, WORDS, use_reentrant=False)).backward(), None),
    "thread": (backward_in_a_thread, None),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_watch_ends_with_its_step_and_leaves_nothing(ending: str) -> None:
    planned, (run, error) = Checkpointable(chain(), plan=plan_of_chain(), watch=True), ENDINGS[ending]
    with without_collector():
        with pytest.raises(error) if error else nullcontext():
            run(planned)
        assert not listening()
        gone = weakref.ref(planned)
        del planned
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("where", ["loss", "backward", "step"])
def test_a_profiler_of_the_user_goes_first(where: str, caplog) -> None:
    planned, profiler = Checkpointable(chain(), plan=plan_of_chain()), torch.profiler.profile()
    around = {where: profiler}
    with around.get("step", nullcontext()):
        output = planned(WORDS)
        with around.get("loss", nullcontext()):
            value = loss(output)
        with around.get("backward", nullcontext()):
            value.backward()
    assert any("log_softmax" in each.key for each in profiler.key_averages())
    assert not listening()
    assert said_in(caplog) == []
    step(planned)  # the next one is watched instead
    assert len(said_in(caplog)) == 1


def test_a_profiler_in_another_thread_runs_and_a_loss_is_compiled_beside_a_watch(caplog) -> None:
    other, ran = Checkpointable(chain()), []
    compiled = torch.compile(loss, backend=lambda graph, inputs: ran.append(graph) or graph.forward)

    def measure() -> None:
        other.measure(WORDS)
        with torch.profiler.profile():
            other.model(WORDS)

    output = planned_for()(WORDS)
    in_threads(measure)
    compiled(output).backward()
    assert other.budget is not None
    assert len(ran) == len(said_in(caplog)) == 1


def added_up(network: nn.Module) -> None:
    network.zero_grad()
    outputs = [network(WORDS.clone()), network(WORDS.clone())]
    (loss(outputs[0]) + loss(outputs[1])).backward()


def each_as_it_comes(network: nn.Module) -> None:
    network.zero_grad()
    first = network(WORDS.clone())
    found = loss(first)
    second = network(WORDS.clone())
    (found + loss(second)).backward()


@pytest.mark.parametrize(("kind", "step"), [("chain", added_up), ("captured", each_as_it_comes)])
def test_a_loss_outside_of_several_forwards_is_planned_for(kind: str, step, caplog) -> None:
    planned = planned_for(kind, share=1.05, forwards_in_flight=2, backward_order="any")
    limit = planned.mem_limit
    assert peak_of(planned, step) > limit
    step(planned)
    assert not listening()
    assert logged(caplog, "over_limit", mem_limit=limit, goes_on=False)
    assert peak_of(planned, step) <= planned.budget.peak_bytes(planned.sequence) <= limit
    step(planned)
    assert len(said_in(caplog)) == 1
    if kind == "chain":
        given = planned_for(share=0.5, forwards_in_flight=2, loss=loss, watch=True)
        for _ in range(2):
            added_up(given)
        assert len(said_in(caplog)) == 1


def test_undeclared_forwards_are_not_taken_for_a_loss(caplog) -> None:
    planned = planned_for(loss=loss, watch=True)
    planned.compute_sequence(int(1.5 * planned.mem_limit))
    measured = planned.inspection_values
    added_up(planned)
    assert not listening()
    assert kinds(caplog) == ["forwards_over_limit"]
    assert planned.inspection_values is measured
    added_up(planned)
    assert peak_of(planned, added_up) <= planned.mem_limit
    assert len(said_in(caplog)) == 2


def test_a_step_whose_forwards_never_come_to_an_end_is_not_watched_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(watched_steps, "_MOST_FORWARDS", 3)
    planned = planned_for(share=0.5, forwards_in_flight=2, loss=loss)
    before = planned(WORDS)
    for number in range(3):
        after = planned(WORDS)
        assert listening() == (number < 2)
        loss(before).backward()
        before = after
    loss(before).backward()


@pytest.mark.parametrize(("told", "backwards"), [(False, 1), (True, 2)])
def test_the_loss_of_several_forwards_is_planned_for_or_warned_of(told: bool, backwards: int, caplog) -> None:
    limit = planned_for(share=0.9, forwards_in_flight=2).mem_limit
    planned = Checkpointable(chain(), mem_limit=limit, fresh_grads=True, forwards_in_flight=1 + told)

    def siamese(planned: nn.Module) -> None:
        planned.zero_grad()
        left, right = planned(WORDS), planned(WORDS.flip(0))
        apart = (left - right).square().mean()
        first = left.square().exp().mean() if backwards == 2 else None
        del left, right
        apart.backward(retain_graph=backwards == 2)
        if first is not None:
            first.backward()

    for _ in range(4):
        siamese(planned)
    assert not listening()
    # Bytes of a loss that several forwards share count for each of them, so that what would fit may be refused.
    fits = not logged(caplog, "over_limit", goes_on=True)
    assert (peak_of(planned, siamese) <= limit) or not fits
    assert any(each.__dict__["numbers"]["loss_bytes"] for each in logged(caplog, "over_limit"))


# Gradients that are kept, although fresh_grads=True.


def test_kept_gradients_are_planned_for_before_a_step_goes_over(caplog) -> None:
    planned, plain = planned_for(share=0.5, loss=loss), chain()
    limit = planned.mem_limit
    step(planned)

    def accumulate() -> None:
        output = planned(WORDS)
        loss(output).backward()

    present = [*planned.parameters(), *(p.grad for p in planned.parameters()), WORDS]
    roomy = planned.compute_sequence("1GB")
    assert measured_peak(accumulate, present, CPU) > limit
    assert said_in(caplog) == []  # there is room for them
    assert planned.sequence is roomy
    planned.compute_sequence(limit)
    accumulate()
    (said,) = said_in(caplog)
    assert logged(caplog, "kept_gradients", mem_limit=limit)
    assert "It was planned again with gradients that are kept." in said
    assert measured_peak(accumulate, present, CPU) <= limit
    assert said_in(caplog) == [said]
    for _ in range(4):
        loss(plain(WORDS)).backward()
    assert same_gradients(planned, plain)


def test_sparse_gradients_add_up_as_in_plain_training_and_are_told_of(caplog) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    words = torch.randint(100, (400,))
    planned = Checkpointable(copy.deepcopy(plain), words, loss=torch.mean, watch=True)
    planned.mem_limit = planned.budget.peak_bytes(planned.compute_sequence())
    for _ in range(3):
        for model in (plain, planned):
            model(words).mean().backward()
    assert torch.equal(plain[0].weight.grad.to_dense(), planned.get_parameter("0.weight").grad.to_dense())
    assert same_gradients(plain[1:], planned[1:])
    assert logged(caplog, "over_limit")


def test_kept_gradients_that_no_plan_has_room_for_are_warned_of(caplog) -> None:
    planned = planned_for(share=0.0, loss=loss)
    sequence = planned.sequence
    for _ in range(3):
        loss(planned(WORDS)).backward()
    (record,) = logged(caplog, "kept_gradients")
    assert said_in(caplog) == [record.getMessage()]
    assert "Training goes on, beyond the limit: a training step needs at least" in record.getMessage()
    assert planned.sequence is sequence


def large_loss(output: torch.Tensor, copies: int) -> torch.Tensor:
    """Of as many nodes for any number of copies."""
    return loss(output) + output.expand(copies, *output.shape).exp().mean()


def retained_step(planned: nn.Module) -> None:
    output = planned(WORDS)
    loss(output).backward(retain_graph=True)
    large_loss(output, 4).backward()


LATER: dict[str, Callable[[nn.Module], None]] = {
    "other nodes": lambda planned: large_loss(planned(WORDS), 4).backward(),
    "second backward": retained_step,
}


@pytest.mark.parametrize("later", LATER)
def test_a_step_of_another_form_has_the_next_one_watched(later: str, caplog) -> None:
    planned = planned_for(loss=loss)
    for _ in range(2):
        lean_step(planned)
    assert said_in(caplog) == []
    for number in range(3):
        planned.zero_grad()
        LATER[later](planned)
        assert not listening()
        assert len(said_in(caplog)) == (number > 0)


def test_steps_are_watched_again_later_and_one_larger_than_all_told_is_told_again(monkeypatch, caplog) -> None:
    monkeypatch.setattr(watched_steps, "_LATER", (4, 6, 8))
    planned = planned_for(loss=lambda output: large_loss(output, 1))
    for number in range(1, 9):
        planned.zero_grad()
        large_loss(planned(WORDS), 1 if number < 3 else 4 if number < 7 else 32).backward()
        assert len(said_in(caplog)) == (number > 3) + (number > 7), number
    assert len(logged(caplog, "over_limit")) == 2


def force_step(network: nn.Module) -> list[torch.Tensor]:
    """A loss of derivatives by the input, as of forces or physics."""
    network.zero_grad()
    x = torch.linspace(0, 1, 256).reshape(128, 2).requires_grad_()
    (slope,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    slope.square().mean().backward()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("stored", [True, False])
def test_after_a_step_with_create_graph_plans_store_what_it_goes_through(stored: bool, caplog) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), *layers, nn.Linear(32, 1))

    planned = Checkpointable(network(), torch.zeros(128, 2, requires_grad=True), "1GB", fresh_grads=True, watch=True)
    if stored:
        planned.mem_limit = planned.budget.peak_bytes(planned.sequence)
    else:
        planned.compute_sequence(planned.budget.least_bytes())
        with raises(InvalidStateError, "create_graph"):
            force_step(planned)
        planned.mem_limit = "1GB"
    for _ in range(3):
        found = force_step(planned)
    assert all(map(torch.equal, found, force_step(network())))
    planned(torch.zeros(128, 2))  # the step before is over when another one begins, as this one is without its output
    assert not listening()
    told = logged(caplog, "over_limit", goes_on=True)
    assert bool(told) == stored
    if stored:
        assert told[0].__dict__["numbers"]["peak_bytes"] > 1.5 * planned.mem_limit
