"""A step that fails: the error is the user's own and names the stage; nothing stays behind; the next step is right."""

import copy
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.interrupts import interrupts
from rotor_profiling import memory_meter
from rotor_py import Checkpointable, CheckpointOptim
from rotor_py.capture.graph.stage_graph import run_graph
from rotor_py.stage.error_context import add_note
from tests.checkpointable.steps import CPU, Applies, Residual, planned_at, same_gradients, square, without_collector
from tests.execute.starved import AtOperators, notes
from tests.training import tripping
from tests.training.loop import differences, planned, rows
from tests.training.tripping import BACKWARD, FORWARD, Caught, chain, left_behind, slots, train_step

KINDS = [chain, Caught]
Kind = Callable[[], nn.Module]


class OwnError(Exception):
    """Neither made from its arguments nor given any."""

    def __init__(self, *, code: int) -> None:
        super().__init__()
        self.code = code


ERRORS = [
    lambda: OwnError(code=7),
    KeyboardInterrupt,
    lambda: ValueError("mine", 3),
    lambda: torch.OutOfMemoryError("no"),
]


@pytest.fixture(autouse=True)
def _no_trips() -> Iterator[None]:
    yield
    FORWARD.reset()
    BACKWARD.reset()


def pair(kind: Kind) -> tuple[Checkpointable, nn.Module]:
    torch.manual_seed(0)
    plain = kind()
    network = planned(copy.deepcopy(plain))
    train_step(network)  # what moves, and what does not, is known from here on
    network.load_state_dict(plain.state_dict())
    return network, plain


def stage_of_the_trip(network: Checkpointable) -> str:
    return "trip#1" if network.captured else "4"


def calls_of_a_step(network: Checkpointable) -> int:
    state = copy.deepcopy(network.state_dict())
    FORWARD.reset()
    train_step(network)
    network.load_state_dict(state)
    return FORWARD.calls


def assert_next_step_is_right(network: Checkpointable, start: nn.Module, kept: list[tuple[str, int, type]]) -> None:
    assert slots(network) == kept  # no alias stands in a parameter's place
    network.load_state_dict(start.state_dict())
    plain = copy.deepcopy(start)
    for seed in (3, 4):
        assert not differences(train_step(network, seed), train_step(plain, seed))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_any_run_is_the_users_own_and_leaves_no_trace(kind: Kind, capfd) -> None:
    network, start = pair(kind)
    kept, runs = slots(network), calls_of_a_step(network)
    assert runs >= 3
    capfd.readouterr()  # in the first plan of a process, the profiler may have said something
    places = [(FORWARD, 1, "forward"), *((FORWARD, at, "recomputation") for at in range(2, runs + 1))]
    places.append((BACKWARD, 1, "backward"))
    own, *others = ERRORS if kind is chain else ERRORS[:2]
    for make, (trip, at, doing) in (*((own, place) for place in places), *((make, places[1]) for make in others)):
        error = make()
        before = (error.args, dict(vars(error)))
        plain = copy.deepcopy(start)
        network.load_state_dict(start.state_dict())
        torch.manual_seed(3)
        FORWARD.reset(1 if doing == "forward" else 0, error)  # plain training never comes to a second run
        with pytest.raises(type(error)) if doing == "forward" else nullcontext():
            plain(rows())
        FORWARD.reset()
        expected = left_behind(plain)
        trip.reset(at, error)
        with pytest.raises(type(error)) as caught:
            train_step(network)
        trip.reset()
        assert caught.value is error
        assert (error.args, {k: v for k, v in vars(error).items() if k != "__notes__"}) == before
        assert traceback.extract_tb(error.__traceback__)[-1].line == "raise self.error"
        assert f"in the {doing} of stage {stage_of_the_trip(network)!r}" in notes(error)
        assert not differences(left_behind(network), expected)
        if network.captured and trip is FORWARD:  # the line of the model is shown
            assert tripping.__file__ in notes(error)
            assert tripping.LINE in notes(error)
    assert capfd.readouterr().err == ""
    assert_next_step_is_right(network, start, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_while_planning_names_the_stage_and_the_next_step_is_right(kind: Kind) -> None:
    start = kind()
    network = Checkpointable(copy.deepcopy(start), loss=square)
    kept = slots(network)
    for at in (1, 2, 3, 6):
        FORWARD.reset(at, OwnError(code=at))
        with pytest.raises(OwnError) as caught:
            train_step(network)
        assert caught.value is FORWARD.error
        assert f"of stage {stage_of_the_trip(network)!r}" in notes(caught.value)
        assert network.sequence is None
        FORWARD.reset()
    assert_next_step_is_right(network, start, kept)


def test_ctrl_c_at_any_operator_of_a_step_leaves_a_model_that_trains_on() -> None:
    network, start = pair(chain)

    def modes() -> dict[str, Any]:
        return {key: value for key, value in left_behind(network).items() if key.startswith("mode")}

    kept, before = slots(network), modes()
    train_step(network)
    with AtOperators() as count:
        train_step(network)
    assert count.calls > 500
    for at in range(1, count.calls, 97):
        with pytest.raises(KeyboardInterrupt), AtOperators(at, error=KeyboardInterrupt):
            train_step(network)
        assert slots(network) == kept
        assert modes() == before
    assert_next_step_is_right(network, start, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_failing_steps_leave_no_bytes_behind(kind: Kind) -> None:
    """Reference counts alone let everything go: the collector of cycles is off."""
    network, _ = pair(kind)
    runs = calls_of_a_step(network)
    errors: weakref.WeakSet[BaseException] = weakref.WeakSet()
    with without_collector():
        for step in range(11):
            fails = step % (runs + 1)  # in one of the runs, or in the backward
            FORWARD.reset(fails, OwnError(code=1))
            BACKWARD.reset(0 if fails else 1, OwnError(code=2))
            errors |= {FORWARD.error, BACKWARD.error}
            with memory_meter(CPU) if step % 10 == 0 else nullcontext() as meter:
                with pytest.raises(OwnError):
                    train_step(network)
                network.zero_grad()
                FORWARD.error = BACKWARD.error = None
            if meter is not None:
                assert meter.phases[""].peak > 0
                assert meter.phases[""].end == 0, step
        assert not errors


def test_what_was_kept_for_a_failed_backward_is_let_go_while_the_error_is_in_hand() -> None:
    """People try again with a smaller batch where they caught the error, with its traceback alive."""
    width, count = 1000, 64
    unit = width * count * 4
    layers = [*(nn.Hardtanh() for _ in range(3)), tripping.tripping, nn.Hardtanh()]
    value = torch.randn(count, width, requires_grad=True)
    FORWARD.reset(2, OwnError(code=1))
    with memory_meter(CPU) as meter:
        sequence = "CF_0, CF_1, CF_2, CF_3, Fe_4, L, B_4, Fe_3, B_3, Fe_2, B_2, Fe_1, B_1, Fe_0, B_0"
        output = CheckpointOptim.apply(layers, sequence, list("abcde"), True, value)
        meter.mark("backward")
        with pytest.raises(OwnError) as caught:
            output.sum().backward()
        meter.mark("in hand")
        assert caught.value.__traceback__ is not None
        del output
    before, after = meter.phases["backward"].start, meter.phases["backward"].end
    assert before == 5 * unit  # a_1, a_2 and a_3, what the last stage keeps, and the output
    assert after < 3.5 * unit  # the output, and what the traceback itself shows: a_3 and its gradient


def test_a_retained_graph_survives_a_backward_that_failed() -> None:
    """As in plain training, where the backward is called again after a hook that raised."""
    network, plain = pair(chain)
    losses = []
    for each in (network, plain):
        torch.manual_seed(3)
        losses.append(square(each(rows())))
    for at in (1, 2):
        FORWARD.reset(at, OwnError(code=1))
        with pytest.raises(OwnError):
            losses[0].backward(retain_graph=True)
    FORWARD.reset()
    network.zero_grad()
    for loss in losses:
        loss.backward()
    assert same_gradients(network, plain)


def test_an_operator_that_fails_in_a_graph_keeps_its_traceback_and_leaves_no_mode_on(capfd) -> None:
    """Called as a module, the graph would print its code and raise without a traceback."""
    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    region = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    product = graph.call_function(torch.mm, (value, value))
    product.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    return value @ value\n'
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (region,))
    graph.output(product)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        run_graph(torch.fx.GraphModule({}, graph), [torch.ones(2, 3)])
    assert "eval_with_key" in traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert 'the operator mm comes from\n  File "model.py", line 7' in notes(caught.value)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning", "ignore:Anomaly Detection has been:UserWarning")
def test_anomaly_detection_finds_what_it_finds_in_plain_training_and_the_stage_is_named() -> None:
    root = Applies(function=lambda value: (value.relu().sqrt() * 0).sum() + value)  # gradients that are no numbers
    plain = nn.Sequential(nn.Linear(12, 32), root, *[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
    network = planned(copy.deepcopy(plain))
    found = []
    for each in (plain, network):
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan values") as caught:
            train_step(each)
        found.append(caught.value)
    assert str(found[0]) == str(found[1])
    assert "in the backward of stage '1'" in notes(found[1])
    plain[1], network[1] = nn.Tanh(), nn.Tanh()
    assert not differences(train_step(network), train_step(plain))


def test_before_python_3_11_the_note_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class OldError(Exception):
        @property
        def add_note(self) -> None:
            raise AttributeError

    error = OldError()
    for _ in range(2):
        add_note(error, "in the forward of stage '4'")
    assert error.__notes__ == ["in the forward of stage '4'"]
    assert caplog.messages == ["OldError: in the forward of stage '4'"]


class Greedy(nn.Linear):
    """Asks for `wanted` bytes on its device when it is run again, in a backward."""

    wanted = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        # Not by counting calls: attributes that a recomputation moves are put back.
        if self.wanted and torch._C._current_graph_task_id() != -1:
            torch.empty(self.wanted, dtype=torch.uint8, device=value.device)
        return super().forward(value)


@pytest.mark.gpu
def test_out_of_memory_on_a_device_names_the_stage_and_a_smaller_batch_trains_after_it(cuda) -> None:
    """A step that fits, then one in which a stage needs more than the allocator may have when it is run again."""
    layers = [nn.Sequential(Greedy(1024, 1024), nn.GELU()) for _ in range(8)]
    plain = nn.Sequential(*layers).to(cuda)
    batch = torch.randn(8192, 1024, device=cuda)
    network = planned_at(0.0, copy.deepcopy(plain), batch)
    square(network(batch)).backward()
    network.zero_grad()
    before = torch.cuda.memory_allocated(cuda)
    greedy = network.model[0][0]
    greedy.wanted = 2**30
    loss = square(network(batch))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(cuda) + 2**29) / total, cuda)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            loss.backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert "of stage '0.0'" in notes(caught.value)
    del loss, caught
    greedy.wanted = 0
    network.zero_grad()
    assert torch.cuda.memory_allocated(cuda) <= before
    square(network(batch[:64])).backward()
    square(plain(batch[:64])).backward()
    assert same_gradients(network, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "captured"])
def test_an_interrupt_at_any_instruction_leaves_nothing_behind(kind: str) -> None:
    assert interrupts(kind, 200) == {"interrupted": 200}


class Stopping(nn.Tanh):
    stops = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.stops:
            raise ArithmeticError
        return super().forward(value)


@pytest.mark.parametrize("kind", [nn.Sequential, Residual])  # a chain, and captured
@pytest.mark.parametrize("first", [False, True])
def test_an_error_while_a_step_is_planned_leaves_what_plain_training_leaves(kind: Any, first: bool) -> None:
    plain = kind(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), Stopping(), nn.BatchNorm1d(8))
    planned = Checkpointable(copy.deepcopy(plain), mem_limit="1GB", loss=square)
    value, left = torch.randn(4, 8), []
    for network, core in ((plain, plain), (planned, planned.model)):
        torch.manual_seed(0)
        if not first:
            square(network(value)).backward()
        core[3].stops = True
        with pytest.raises(ArithmeticError):
            network(value)
        left.append([*core.buffers(), torch.get_rng_state()])
    assert all(map(torch.equal, *left))
