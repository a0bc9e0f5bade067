"""Steps are watched: a loss outside that nobody planned for is planned for, once, and told of in one line."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_py.plan.observers import watched_steps
from rotor_py.validate.verification import verify
from tests.checkpointable.steps import CPU, between
from tests.execute.training import assert_same
from tests.fields import logged

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it
VOCABULARY = 1024
WORDS = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.layers(self.norm(value))


def chain() -> nn.Sequential:
    """A small language model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), *[Block(32) for _ in range(6)], nn.Linear(32, VOCABULARY))


class Captured(nn.Module):
    """The same, but no chain: TorchDynamo captures it. It returns a dict, with tensors beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        value = self.layers[0](words)
        for layer in self.layers[1:-1]:
            value = layer(value)
        return {"logits": self.layers[-1](value), "means": value.mean(-1)}


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": Captured}


def loss(output: Any) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits.flatten(0, 1), WORDS.flatten())


def planned_for(kind: str = "chain", share: float = 1.0, **options: Any) -> Checkpointable:
    """With a limit `share` of the way to storing everything, as far as the planner knows."""
    planned = Checkpointable(MODELS[kind](), fresh_grads=True, **options)
    planned.measure(WORDS)
    planned.compute_sequence(between(planned, share))
    return planned


def step(planned: nn.Module) -> None:
    planned.zero_grad()
    output = planned(WORDS)
    loss(output).backward()


def lean_step(planned: nn.Module) -> None:
    """As the loops of many people have it."""
    planned.zero_grad()
    loss(planned(WORDS)).backward()


def peak_of(planned: nn.Module, step: Callable[[nn.Module], None] = step) -> int:
    planned.zero_grad()
    return measured_peak(lambda: step(planned), [*planned.parameters(), WORDS], CPU)


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rotor_py"]


@pytest.mark.parametrize("step", [step, lean_step])
@pytest.mark.parametrize("kind", MODELS)
def test_a_loss_outside_is_planned_for_after_the_first_step(
    kind: str, step: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_for(kind)
    limit = planned.mem_limit
    assert peak_of(planned, step) > limit  # a meter is a profiler, and that goes first: the step was not watched
    assert said_in(caplog) == []
    step(planned)
    (said,) = said_in(caplog)
    assert logged(caplog, "over_limit", mem_limit=limit)
    assert "pass it as loss=, or loss_tmp_memory_usage=" in said
    assert "It was planned again with that" in said
    peak = peak_of(planned, step)
    assert peak <= planned.budget.peak_bytes(planned.sequence) <= limit
    assert peak >= 0.95 * planned.budget.peak_bytes(planned.sequence)
    for _ in range(2):
        step(planned)
    assert said_in(caplog) == [said]


def test_what_is_written_as_the_line_says_keeps_the_first_step_inside_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned = planned_for()
    step(planned)
    (said,) = said_in(caplog)
    caplog.clear()
    temp = int(said.partition("loss_tmp_memory_usage=")[2].partition(",")[0])
    for options in ({"loss_tmp_memory_usage": temp}, {"loss": loss}):
        told = Checkpointable(chain(), mem_limit=planned.mem_limit, fresh_grads=True, **options)
        told.measure(WORDS)
        told.compute_sequence()
        before = told.budget
        assert peak_of(told) <= planned.mem_limit
        step(told)
        assert before.chain == told.budget.chain
        assert said_in(caplog) == []


def test_a_step_inside_the_limit_says_nothing_and_its_loss_counts(caplog: pytest.LogCaptureFixture) -> None:
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


def test_numbers_are_those_of_plain_training_while_steps_are_watched() -> None:
    planned, plain = planned_for(), chain()
    for model in (planned, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            lean_step(model)
            optimizer.step()
    assert_same(list(planned.named_parameters()), list(plain.named_parameters()))


def test_where_no_plan_has_room_training_goes_on_and_a_warning_says_what_would_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned = planned_for(share=0.0)
    sequence = planned.sequence
    for _ in range(3):
        step(planned)
    (said,) = said_in(caplog)
    assert logged(caplog, "over_limit", goes_on=True)
    assert f"{planned.budget.least_bytes()} bytes" in said
    assert planned.sequence is sequence
    assert peak_of(planned) > planned.mem_limit


@pytest.mark.parametrize("options", [{"every_n_layers": 2}, {"plan": None}], ids=["by hand", "from a file"])
def test_plans_that_are_not_ours_to_change_stay_and_a_warning_says_so(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = planned_for(**({} if "plan" in options else options))
    if "plan" in options:
        options = {"plan": made.plan()}
    planned = Checkpointable(chain(), mem_limit=made.mem_limit, fresh_grads=True, **options)
    before = None if "plan" not in options else planned.sequence
    for _ in range(2):
        step(planned)
    assert len(said_in(caplog)) == 1
    assert logged(caplog, "over_limit", goes_on=True)
    assert before in (None, planned.sequence)


def test_only_the_first_step_by_a_plan_is_watched_unless_all_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for watch in (None, True):
        caplog.clear()
        planned = planned_for(loss=lambda output: output.mean(), watch=watch)
        planned(WORDS).mean().backward()
        step(planned)
        assert len(said_in(caplog)) == bool(watch)
        assert (peak_of(planned) > planned.mem_limit) is (watch is None)


def test_no_step_is_watched_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_for(watch=False)
    step(planned)
    assert said_in(caplog) == []
    assert planned.inspection_values.loss.temp_bytes == 0
    planned.watch = None
    step(planned)
    assert len(said_in(caplog)) == 1


def test_verifying_a_plan_does_not_change_it(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_for()
    sequence = planned.sequence
    (found,) = verify(planned, WORDS, loss=loss, fresh_grads=True)
    assert found.measured_peak_bytes > planned.mem_limit
    assert planned.sequence is sequence
    assert said_in(caplog) == []
    step(planned)
    assert planned.sequence is not sequence


def test_a_step_over_the_limit_after_it_was_planned_again_is_told_of_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned = planned_for(watch=True)
    step(planned)
    sequence = planned.sequence
    for _ in range(3):
        planned.zero_grad()
        output = planned(WORDS)
        extra = [output.detach().clone() for _ in range(4)]
        loss(output).backward()
    del extra
    first, second = said_in(caplog)
    assert "It was planned again with that" in first
    assert "It was planned again before" in second
    assert planned.sequence is sequence


def test_outputs_of_earlier_steps_do_not_hide_what_a_step_takes(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_for(loss=loss, watch=True)
    output = None
    for number in range(2):  # the output of one step is let go of in the next one, after its forward
        planned.zero_grad()
        output = planned(WORDS)
        extra = torch.zeros(output.numel() // 2 * number)
        loss(output).backward()
        del extra
        assert len(said_in(caplog)) == number


@pytest.mark.parametrize("first_watched", [False, True])
def test_gradients_that_are_freed_after_the_forward_do_not_count_twice(
    first_watched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])  # gradients are most of what it takes
    row = torch.ones(1, 256)
    planned = Checkpointable(model, watch=first_watched)
    planned.measure(row)
    planned.compute_sequence(between(planned, 1.0))
    planned(row).mean().backward()
    planned.watch = True
    for _ in range(2):
        output = planned(row)
        planned.zero_grad()
        output.mean().backward()
    assert said_in(caplog) == []


def test_a_first_step_is_seen_as_those_that_find_an_optimizer_state(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    row = torch.ones(1, 256)
    planned = Checkpointable(model, fresh_grads=True, optimizer=torch.optim.AdamW(model.parameters()))
    planned.measure(row)
    planned.compute_sequence(between(planned, 1.0))
    state = planned.budget.fixed.optimizer
    held: list[torch.Tensor] = []
    model[0].weight.register_hook(lambda gradient: held.append(torch.zeros(state // 5)))
    planned(row).mean().backward()
    (record,) = logged(caplog, "over_limit")
    assert record.__dict__["numbers"]["other_bytes"] > 0
    assert held[0].nbytes < state  # there was room for it in this step


# Nothing is left behind, and nobody's way is blocked.


def test_several_forwards_before_one_backward_with_a_given_loss_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_for(share=0.5, forwards_in_flight=2, loss=loss, watch=True)
    for _ in range(2):
        sum(loss(planned(WORDS)) for _ in range(2)).backward()
        planned.zero_grad()
    assert said_in(caplog) == []


def listening() -> bool:
    return torch.autograd._profiler_enabled()


def dropped(planned: Checkpointable) -> None:
    planned(WORDS)


def failing_loss(planned: Checkpointable) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        nn.functional.cross_entropy(planned(WORDS).flatten(0, 1), WORDS)


def failing_forward(planned: Checkpointable) -> None:
    with pytest.raises(IndexError):
        planned(WORDS + VOCABULARY)


def failing_backward(planned: Checkpointable) -> None:
    output = planned(WORDS)
    output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(output).backward()


def without_parameters(planned: Checkpointable) -> None:
    torch.autograd.grad(loss(planned(WORDS)), list(planned.parameters()))


def recomputed(planned: Checkpointable) -> None:
    # A second forward runs inside of the engine, where no watch can be stopped.
    output: torch.Tensor = checkpoint(planned, WORDS, use_reentrant=False)
    loss(output).backward()


def backward_in_a_thread(planned: Checkpointable) -> None:
    value = loss(planned(WORDS))
    thread = threading.Thread(target=value.backward)
    thread.start()
    thread.join()
    del value
    planned(WORDS)  # here the thread of the forward comes by again


@pytest.mark.parametrize(
    "ending",
    [
        step,
        dropped,
        failing_loss,
        failing_forward,
        failing_backward,
        without_parameters,
        recomputed,
        backward_in_a_thread,
    ],
)
def test_a_watch_ends_with_its_step_and_leaves_nothing(ending: Callable[[Checkpointable], None]) -> None:
    planned = planned_for(watch=True)
    gc.collect()
    gc.disable()
    try:
        ending(planned)
        assert not listening()
        gone = weakref.ref(planned)
        del planned
    finally:
        gc.enable()
    gc.collect()
    assert gone() is None


def in_the_loss(planned: Checkpointable, profiler: Any) -> Any:
    output = planned(WORDS)
    with profiler:
        value = loss(output)
    value.backward()
    return profiler


def in_the_backward(planned: Checkpointable, profiler: Any) -> Any:
    value = loss(planned(WORDS))
    with profiler:
        value.backward()
    return profiler


def around(planned: Checkpointable, profiler: Any) -> Any:
    with profiler:
        step(planned)
    return profiler


@pytest.mark.parametrize("place", [in_the_loss, in_the_backward, around])
def test_a_profiler_of_the_user_goes_first(
    place: Callable[[Checkpointable, Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_for()
    found = place(planned, torch.profiler.profile()).key_averages()
    assert any("log_softmax" in each.key for each in found)
    assert not listening()
    assert said_in(caplog) == []
    planned.zero_grad()
    step(planned)  # the next one is watched instead
    assert len(said_in(caplog)) == 1


def test_a_profiler_in_another_thread_runs_beside_a_watch(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_for()
    other = Checkpointable(chain())

    def measure() -> None:
        other.measure(WORDS)
        with torch.profiler.profile():
            other.model(WORDS)

    output = planned(WORDS)
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    loss(output).backward()
    assert other.budget is not None
    assert len(said_in(caplog)) == 1


def test_a_compiled_loss_is_compiled_while_it_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    ran = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        ran.append(graph)
        return graph.forward

    compiled = torch.compile(loss, backend=backend)
    planned = planned_for()
    compiled(planned(WORDS)).backward()
    assert len(ran) == 1
    assert len(said_in(caplog)) == 1


def added_up(network: nn.Module) -> None:
    network.zero_grad()
    outputs = [network(WORDS.clone()), network(WORDS.clone())]
    (loss(outputs[0]) + loss(outputs[1])).backward()


def one_after_the_other(network: nn.Module) -> None:
    network.zero_grad()
    outputs = [network(WORDS.clone()), network(WORDS.clone())]
    for output in outputs:
        loss(output).backward()


def each_as_it_comes(network: nn.Module) -> None:
    network.zero_grad()
    first = network(WORDS.clone())
    found = loss(first)
    second = network(WORDS.clone())
    (found + loss(second)).backward()


@pytest.mark.parametrize("step", [added_up, one_after_the_other, each_as_it_comes])
@pytest.mark.parametrize("kind", MODELS)
def test_a_loss_outside_of_several_forwards_is_planned_for(
    kind: str, step: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    planned = planned_for(kind, share=1.05, forwards_in_flight=2, backward_order="any")
    limit = planned.mem_limit
    assert peak_of(planned, step) > limit
    step(planned)
    assert not listening()
    assert len(said_in(caplog)) == 1
    assert logged(caplog, "over_limit", mem_limit=limit, goes_on=False)
    for _ in range(2):
        assert peak_of(planned, step) <= planned.budget.peak_bytes(planned.sequence) <= limit
        step(planned)
    assert len(said_in(caplog)) == 1


def test_forwards_that_nobody_told_of_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """What they take beyond the limit is no loss, nor anything else that is held."""
    planned = planned_for(loss=loss, watch=True)
    planned.compute_sequence(int(1.5 * planned.mem_limit))
    measured = planned.inspection_values
    added_up(planned)
    assert not listening()
    (said,) = said_in(caplog)
    assert said.startswith("2 forwards of ")
    assert planned.inspection_values is measured
    added_up(planned)
    assert peak_of(planned, added_up) <= planned.mem_limit
    assert len(said_in(caplog)) == 2


def test_a_step_whose_forwards_never_come_to_an_end_is_not_watched_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_steps, "_MOST_FORWARDS", 3)
    planned = planned_for(share=0.5, forwards_in_flight=2, loss=loss)
    before = planned(WORDS)
    for _ in range(2):
        output = planned(WORDS)
        loss(before).backward()
        before = output
    assert listening()
    after = planned(WORDS)
    assert not listening()
    assert planned._planner.in_use.watched is planned.sequence
    (loss(before) + loss(after)).backward()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
def test_what_a_loss_of_several_forwards_needs_is_planned_for_or_told_of(
    told: bool, backwards: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"forwards_in_flight": 2} if told else {}
    planned = planned_for(share=0.9, forwards_in_flight=2)  # for its limit
    planned = Checkpointable(chain(), mem_limit=planned.mem_limit, fresh_grads=True, **options)

    def siamese(planned: nn.Module) -> None:
        planned.zero_grad()
        left, right = planned(WORDS), planned(WORDS.flip(0))
        apart = (left - right).square().mean()
        if backwards == 1:
            apart.backward()
            return
        first = left.square().exp().mean()
        del left, right
        apart.backward(retain_graph=True)
        first.backward()

    for _ in range(4):
        siamese(planned)
    assert not listening()
    # Bytes of a loss that several forwards share count for each of them, so that what would fit may be refused.
    fits = not logged(caplog, "over_limit", goes_on=True)
    assert (peak_of(planned, siamese) <= planned.mem_limit) or not fits
    assert fits or not told or backwards == 2
    assert any(each.__dict__["numbers"]["loss_bytes"] for each in logged(caplog, "over_limit"))


# Gradients that are kept, although fresh_grads=True.


def keeping() -> Checkpointable:
    return planned_for(share=0.5, loss=loss)


def test_kept_gradients_are_planned_for_before_a_step_goes_over(caplog: pytest.LogCaptureFixture) -> None:
    planned, plain = keeping(), chain()
    limit = planned.mem_limit
    step(planned)
    assert said_in(caplog) == []
    gradients = [p.grad for p in planned.parameters()]

    def accumulate() -> None:
        output = planned(WORDS)
        loss(output).backward()

    present = [*planned.parameters(), *gradients, WORDS]
    planned.compute_sequence("1GB")
    unlimited = measured_peak(accumulate, present, CPU)
    assert unlimited > limit
    planned.compute_sequence(limit)
    accumulate()
    (said,) = said_in(caplog)
    assert logged(caplog, "kept_gradients", mem_limit=limit)
    assert "It was planned again with gradients that are kept." in said
    assert "It was planned again with gradients that are kept." in said
    assert measured_peak(accumulate, present, CPU) <= limit
    assert said_in(caplog) == [said]
    for _ in range(4):
        loss(plain(WORDS)).backward()
    assert_same(
        [(n, p.grad) for n, p in planned.named_parameters()], [(n, p.grad) for n, p in plain.named_parameters()]
    )


def test_kept_gradients_that_no_plan_has_room_for_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_for(share=0.0, loss=loss)
    sequence = planned.sequence
    for _ in range(3):
        loss(planned(WORDS)).backward()
    (said,) = said_in(caplog)
    assert logged(caplog, "kept_gradients")
    assert "Training goes on, beyond the limit: a training step needs at least" in said
    assert planned.sequence is sequence


def test_kept_gradients_that_fit_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    planned = keeping()
    planned.compute_sequence("1GB")
    sequence = planned.sequence
    for _ in range(2):
        loss(planned(WORDS)).backward()
    assert said_in(caplog) == []
    assert planned.sequence is sequence


def test_a_copy_is_watched_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    planned = planned_for()
    step(planned)
    twin = copy.deepcopy(planned)
    with caplog.at_level(logging.WARNING):
        step(twin)
    assert peak_of(twin) <= planned.mem_limit
