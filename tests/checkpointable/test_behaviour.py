"""`Checkpointable` as people use it: it is the model to all code, plans when it must, and measuring changes nothing."""

import copy
import inspect
import pickle
import random
import weakref
from collections.abc import Callable
from threading import Thread
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rotor_py import Checkpointable, InfeasibleError, UnsupportedModelError
from rotor_py.measure.budget import recomputes
from rotor_py.measure.planning_lock import planning
from rotor_solver import Persistent, RecomputeAll, StoreAll, recompute_all, store_all
from tests.checkpointable.steps import (
    Tower,
    between,
    blocks,
    images,
    planned_at,
    same_gradients,
    square,
    step_peak,
    without_collector,
)
from tests.execute.sequences import everything_again
from tests.execute.training import assert_same, steps
from tests.execute.zoo import moving_buffers
from tests.fields import logged, raises


def test_names_state_dict_and_attributes_are_the_models() -> None:
    network = blocks(2, 8)
    network.note = "mine"
    planned = Checkpointable(network, mem_limit="1GB")
    assert list(planned.state_dict()) == list(network.state_dict())
    assert [name for name, _ in planned.named_parameters()] == [name for name, _ in network.named_parameters()]
    assert [id(p) for p in planned.parameters()] == [id(p) for p in network.parameters()]
    assert planned.note == "mine"
    planned.note = "yours"
    assert network.note == "yours"
    assert planned[0] is network[0]
    assert len(planned) == len(network)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        planned.nothing_like_this  # noqa: B018 # the access is the test
    blocks(2, 8).load_state_dict(planned.state_dict())
    assert all(p.dtype == torch.float64 for p in planned.double().model.parameters())


def test_copies_train_on_their_own() -> None:
    planned, batch = planned_at(0.3), images()
    for twin in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert twin[0].weight is not planned[0].weight
        assert twin[0].weight is twin.model[0].weight
        plain = copy.deepcopy(planned.model)
        assert_same(steps(twin, twin, batch), steps(plain, plain, batch))
        assert all(p.grad is None for p in planned.parameters())


def test_measuring_changes_nothing() -> None:
    network, batch, calls = blocks(4, 16), images(), []
    network[1].append(nn.Dropout(0.5))
    network.eval()
    network[3].train()
    for p in network.parameters():
        p.grad = torch.randn_like(p)
        p.register_hook(calls.append)
    optimizer = torch.optim.Adam(network.parameters())
    torch.manual_seed(7), random.seed(7), np.random.seed(7)  # the global states are the point

    def state() -> tuple[list[torch.Tensor], list[object]]:
        tensors = [*network.parameters(), *network.buffers(), *[p.grad for p in network.parameters()], batch]
        modes = [module.training for module in network.modules()]
        others = [[(id(t), t._version) for t in tensors], modes, random.getstate(), np.random.get_state()[1].tolist()]
        return [torch.get_rng_state(), *(t.clone() for t in tensors)], others

    before = state()
    planned = Checkpointable(network, mem_limit="1GB", loss=square, optimizer=optimizer)
    planned.measure(batch)
    planned.compute_sequence()
    found = state()
    assert all(map(torch.equal, found[0], before[0]))
    assert found[1] == before[1]
    assert not calls
    assert not optimizer.state
    # A layer before the chain that writes into its input does not do so while it is measured.
    Checkpointable(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 6, 1))).measure(batch)
    assert torch.equal(batch, before[0][-1])


def test_measuring_waits_for_its_turn_before_it_sets_the_mode() -> None:
    network = Checkpointable(blocks(2, 8)).eval()
    measuring = Thread(target=network.measure, args=(images(),))
    with planning:
        measuring.start()
        measuring.join(timeout=0.2)
        assert not network.training
    measuring.join()
    assert network.budget is not None
    assert not network.training


def test_progress_is_reported_by_stage_and_on_a_terminal_a_bar_is_shown(monkeypatch, capsys) -> None:
    seen: list[tuple[int, int, str]] = []
    monkeypatch.setattr("rotor_py.report.progress.PATIENCE_SECONDS", 0.0)
    planned = Checkpointable(blocks(2, 8), images(), progress=lambda *state: seen.append(state))
    count = len(planned.names)
    assert seen[:count] == [(0, count, name) for name in planned.names]  # looked at
    assert seen[count : 2 * count] == [(number, count, name) for number, name in enumerate(planned.names)]
    assert seen[-1] == (count, count, "again, for their times")
    Checkpointable(blocks(2, 8), images())
    assert capsys.readouterr().err == ""  # not a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    Checkpointable(blocks(2, 8)).measure(images())
    assert "measuring" in capsys.readouterr().err


def test_a_counter_around_the_step_that_is_planned_counts_that_step_alone() -> None:
    planned = Checkpointable(blocks(4, 16), mem_limit="1GB", cache=False)
    counted = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            square(planned(images())).backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_a_smaller_batch_uses_the_plan_evaluation_the_model_and_another_shape_is_planned_again() -> None:
    planned = planned_at(0.3)
    sequence, calls = planned.sequence, []
    planned.register_forward_hook(lambda *_: calls.append("forward"))
    for batch in (1, 4):  # a smaller batch uses the plan
        planned(images(batch)).sum().backward()
        assert planned.sequence is sequence
    assert calls == ["forward"] * 2  # hooks of the whole model are called once a step
    x = images()
    planned.eval()
    assert torch.equal(planned(x), planned.model(x))
    assert not planned.model.training
    planned.train()
    assert planned.model.training
    with torch.no_grad():
        assert not planned(x).requires_grad
    planned.mem_limit = "1GB"
    planned(images(4, 20)).sum().backward()
    assert planned.plan().input["tensors"][0]["shape"] == [4, 3, 20, 20]
    with pytest.raises(RuntimeError, match=r"[Tt]ype"):
        planned(images().double())
    planned(images(4, 20)).sum().backward()


def _doubled(layers: nn.Sequential, value: torch.Tensor) -> torch.Tensor:
    return 2 * nn.Sequential.forward(layers, value)


class CalledTwice(nn.Sequential):
    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(value)


def test_a_model_that_has_changed_is_planned_anew() -> None:
    planned = planned_at(0.3)
    planned.mem_limit = "1GB"
    for change in (
        lambda: planned.__setitem__(2, nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1))),
        lambda: planned[1].requires_grad_(False),
        lambda: planned[1][1].eval(),
        lambda: planned[1].register_forward_hook(lambda module, arguments, output: 3 * output),
        lambda: setattr(planned[2], "forward", MethodType(_doubled, planned[2])),
        lambda: planned.__setitem__(2, CalledTwice(nn.Conv2d(16, 16, 1))),
        lambda: planned.__delitem__(1),
    ):
        sequence = planned.sequence
        planned.zero_grad()
        change()
        plain, batch = copy.deepcopy(planned.model), images()
        assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
        assert planned.sequence is not sequence


def test_inputs_may_be_keywords_tuples_and_dicts() -> None:
    for given in (images(), (images(),), {"input": images()}):
        planned = planned_at(0.2, blocks(2, 8), given)
        planned(input=images()).sum().backward()
        assert planned[0].weight.grad is not None


def test_the_constructor_measures_and_plans_and_before_that_asking_says_so(caplog) -> None:
    planned = Checkpointable(blocks(2, 8), mem_limit="1GB")
    for ask in (planned.build_chain, planned.compute_sequence, planned.plan, planned.summary):
        with raises(ValueError, "not_measured"):
            ask()
    planned.measure(images())
    assert "limit 1.00 GB" in planned.summary()  # which solves first
    assert planned.sequence is not None
    planned = Checkpointable(blocks(2, 8), images(), "1GB", verbosity=1)
    assert logged(caplog, "summary")
    assert planned.sequence == store_all(planned.chain)
    assert planned.names[:3] == ["0", "1.0", "1.1+1.2"]  # in-place layers are joined to their predecessor
    assert [len(planned.names), len(planned.functions)] == [len(planned.chain)] * 2


def test_too_small_a_limit_says_what_would_do() -> None:
    planned = planned_at(0.5)
    least = between(planned, 0.0)
    with pytest.raises(InfeasibleError) as caught:
        planned.compute_sequence(least - 1)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.min_bytes, caught.value.mem_limit) == (least, least - 1)
    assert caught.value.stage is not None
    for part in (f"({least} bytes)", f"({least - 1} bytes)", "parameters", "Try a smaller batch"):
        assert part in str(caught.value)
    planned.compute_sequence(least)
    step_peak(planned, images())
    assert step_peak(planned, images()) <= least


@pytest.mark.parametrize(
    ("fresh", "refused"),
    [
        (False, lambda planned: planned.compute_sequence(1000)),
        (True, lambda planned: planned.compute_sequence(1000)),
        (True, lambda planned: planned(images(64, 64))),  # before measuring
    ],
)
def test_a_refused_limit_holds_nothing_once_its_error_is_gone(fresh: bool, refused: Callable[..., object]) -> None:
    planned = Checkpointable(blocks(2, 8), mem_limit="500kB", loss=square, fresh_grads=fresh)
    planned.measure(images(1, 8))
    with without_collector():
        with pytest.raises(InfeasibleError) as caught:
            refused(planned)
        held = weakref.ref(caught.value)  # its traceback holds the frames of the caller, with the batch
        del caught
        assert held() is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_bad_limits_optimizers_and_models_that_cannot_be_cut_are_refused_in_words() -> None:
    for limit in ("4XB", -1, "", float("nan"), True, "120%"):
        with pytest.raises(ValueError, match=r"limit|bytes|%"):
            Checkpointable(blocks(1, 4), mem_limit=limit)
    for optimizer in (torch.optim.SGD, [1]):
        with raises(TypeError, "not_an_optimizer", name="optimizer"):
            Checkpointable(blocks(1, 4), optimizer=optimizer)

    with raises(UnsupportedModelError, "no_graph", name="Identity"):
        Checkpointable(nn.Identity(), mem_limit="1GB")(torch.randn(2, requires_grad=True))
    whole, scripted = Checkpointable(blocks(1, 4)), torch.jit.script(nn.ReLU())
    for part, kind in ((whole, "wrapped_twice"), (scripted, "scripted")):
        for model, name in ((part, "model"), (nn.Sequential(nn.ReLU(), nn.Sequential(part)), "1.0")):
            with raises(UnsupportedModelError, kind, name=name):
                Checkpointable(model)
    for no_model in (nn.ReLU, lambda x: x):
        with raises(UnsupportedModelError, "not_a_module"):
            Checkpointable(no_model)  # type: ignore[arg-type]
    with raises(UnsupportedModelError, "in_place_input"):
        Checkpointable(nn.Sequential(nn.ReLU(True), nn.Linear(2, 2))).measure(torch.randn(2, 2, requires_grad=True))
    frozen = Checkpointable(blocks(1, 4).requires_grad_(False))
    with raises(UnsupportedModelError, "no_gradient"):
        frozen.measure(images())
    assert not frozen(images()).requires_grad  # it is just run


class Handing(nn.Linear):
    """Its forward hands a tensor to the last layer's: as a second output, or in a dict."""

    def __init__(self, kept: dict[str, torch.Tensor] | None, *, last: bool = False) -> None:
        super().__init__(16, 16)
        self.kept, self.last = kept, last

    def forward(self, given):
        if self.last:
            given, other = given if self.kept is None else (given, self.kept.pop("other"))
            return super().forward(given) + other
        output = super().forward(given)
        if self.kept is None:
            return output.tanh(), output
        self.kept["other"] = output
        return output.tanh()


class Loop(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given)
        return given


def test_a_chain_whose_layers_share_a_dict_is_refused_and_plans_as_the_error_says() -> None:
    batch, found = torch.randn(64, 16), []
    for kept, wrap in (({}, nn.Sequential), ({}, Loop), (None, nn.Sequential)):
        torch.manual_seed(0)
        layers = nn.Sequential(Handing(kept), Handing(kept, last=True), nn.Linear(16, 16))
        planned = Checkpointable(wrap(layers), mem_limit="1GB", loss=square, cache=False)
        if kept is not None and wrap is nn.Sequential:
            with raises(UnsupportedModelError, "hidden_input", name="0.1"):
                planned(batch)
            planned = planned.model
        square(planned(batch)).backward()
        found.append([each.grad for each in layers.parameters()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_algorithms_and_slots_are_passed_on() -> None:
    planned = planned_at(0.4)
    chain = planned.build_chain()
    limit = planned.mem_limit
    assert planned.compute_sequence(limit, algo=RecomputeAll()) == recompute_all(chain)
    assert planned.compute_sequence(limit, algo=Persistent, slots=50).algorithm == "persistent"
    with pytest.raises(InfeasibleError):
        planned.compute_sequence(limit, algo=StoreAll())
    with raises(ValueError, "not_a_count", name="slots"):
        planned.compute_sequence(limit, mem_slots=0)


class Sly(nn.Linear):
    """Its last digits depend on whether a graph is recorded; nothing about its type says so."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # as the base class has it
        return super().forward(input) * (1 if torch.is_grad_enabled() else 1.0001)


def test_stages_that_depend_on_the_graph_are_found_by_measuring() -> None:
    plain, batch = nn.Sequential(*[Sly(8, 8) for _ in range(6)]), torch.randn(20, 8)
    planned = planned_at(0.0, copy.deepcopy(plain), batch)
    assert recomputes(planned.sequence)
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
    assert all(traits.graph_dependent for traits in planned.plan().traits)


def test_tensors_without_gradient_stay_so_where_stages_are_recomputed() -> None:
    """A mask that a stage makes must not come to need a gradient: that would cost memory nobody has planned."""
    seen: list[bool] = []

    class Begin(nn.Linear):
        def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # as the base class
            return super().forward(input), (input > 0).float()

    class Masked(nn.Linear):
        def forward(self, input: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(input[1].requires_grad)
            return super().forward(input[0]) * input[1], input[1]

    torch.manual_seed(0)
    network = nn.Sequential(Begin(16, 16), *[Masked(16, 16) for _ in range(5)])
    batch = torch.randn(500, 16)
    planned = planned_at(0.5, network, batch, loss=lambda pair: pair[0].sum(), fresh_grads=True)
    for share in (0.0, 0.5):
        planned.compute_sequence(between(planned, share))
        peak = step_peak(planned, batch, fresh_grads=True, loss=lambda pair: pair[0].sum())
        assert peak <= planned.budget.peak_bytes(planned.sequence)
        assert recomputes(planned.sequence)
    assert not planned(batch)[1].requires_grad
    assert not any(seen)


def test_moving_buffers_are_right_where_forwards_come_before_their_backwards() -> None:
    plain, batches = moving_buffers(), [torch.randn(9, 6) for _ in range(3)]
    planned = Checkpointable(copy.deepcopy(plain), batches[0], loss=square)
    planned.sequence = everything_again(len(planned.names))
    for each in (planned, plain):
        losses = [square(each(batch)) for batch in batches]
        identities = [id(buffer) for buffer in each.buffers()]
        for loss in losses:
            loss.backward()
        assert [id(buffer) for buffer in each.buffers()] == identities
    assert all(map(torch.equal, planned.buffers(), plain.buffers()))
    assert same_gradients(planned, plain)


def test_a_transform_of_torch_func_is_refused_in_a_sentence_and_the_model_itself_goes_through_it() -> None:
    planned, batch = Checkpointable(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), mem_limit="1GB"), torch.randn(3, 4)
    parameters = dict(planned.named_parameters())

    def of(network: nn.Module) -> dict[str, torch.Tensor]:
        return torch.func.grad(lambda p: torch.func.functional_call(network, p, (batch,)).sum())(parameters)

    with raises(UnsupportedModelError, "function_transform"):
        of(planned)
    assert of(planned.model).keys() == parameters.keys()


class Scaled(nn.Module):
    """A model with a signature of its own, and no `**kwargs`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.last(self.first(value).tanh() * scale)


def test_it_has_the_class_of_the_model_and_its_own_and_the_signature_of_the_models_forward() -> None:
    planned = Checkpointable(Scaled())
    assert isinstance(planned, Scaled)
    assert isinstance(planned, Checkpointable)
    assert (planned.__class__, type(planned)) == (Scaled, Checkpointable)
    assert not isinstance(planned, nn.Sequential)
    assert inspect.signature(planned.forward) == inspect.signature(Scaled().forward)
    assert list(inspect.signature(planned.__class__.forward).parameters) == ["self", "value", "scale"]
    assert inspect.signature(Checkpointable(nn.Sequential()).forward) == inspect.signature(nn.Sequential().forward)
    for name in ("budget", "captured", "chain", "device", "functions", "inspection_values", "names"):
        with pytest.raises(AttributeError, match=name):  # what only the planner knows cannot be set
            setattr(planned, name, None)
        assert name not in vars(planned.model)


def test_a_copy_is_a_checkpointable_of_the_same_model_and_so_is_one_of_another_class() -> None:
    class Shouting(Scaled):
        def shout(self) -> str:
            return "ah"

    planned = Checkpointable(Scaled(), mem_limit="1GB")
    for twin in (copy.deepcopy(planned), copy.copy(planned), pickle.loads(pickle.dumps(planned))):
        assert (type(twin), twin.__class__) == (Checkpointable, Scaled)
        assert twin.mem_limit == "1GB"
    planned.__class__ = Shouting
    assert (type(planned), type(planned.model)) == (Checkpointable, Shouting)
    assert planned.shout() == "ah"


def test_a_forward_that_is_put_on_it_is_called_and_may_call_the_one_before() -> None:
    """As Accelerate does for mixed precision."""
    model = Scaled()
    planned = Checkpointable(model, mem_limit="1GB")
    before = planned.forward.__func__
    planned.forward = MethodType(lambda self, *args: before(self, *args).double(), planned)
    batch = torch.randn(2, 6)
    for mode in (True, False):
        planned.train(mode)
        assert planned(batch).dtype == torch.float64
        assert model(batch).dtype == torch.float32
    assert planned.sequence is not None


class WithLoss(Tower):
    """As a LightningModule, or a model with a `compute_loss`, is written."""

    _calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) / self.scale

    @property
    def scale(self) -> float:
        return 2.0 if self._calls < 100 else 4.0

    def compute_loss(self, value: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return self(value).square().mean()

    def training_step(self, value: torch.Tensor) -> torch.Tensor:
        return self.compute_loss(value)

    def predict(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self(value)


class Derived(WithLoss):
    def training_step(self, value: torch.Tensor) -> torch.Tensor:
        return super().training_step(value) * 2


def test_a_method_that_calls_self_follows_the_plan_with_the_same_numbers_and_attributes_are_the_models() -> None:
    model, batch = Derived(64, 6), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    planned = planned_at(0.3, model, batch, fresh_grads=True)
    for network in (planned, plain):
        for _ in range(2):
            network.zero_grad()
            network.training_step(batch).backward()
    assert recomputes(planned.sequence)
    assert same_gradients(planned, plain)
    assert planned._calls == model._calls == plain._calls == 2
    planned._calls = 100
    assert model._calls == 100
    assert planned.scale == 4.0
    del planned._calls
    assert "_calls" not in vars(model)


def test_in_eval_mode_and_without_gradients_methods_are_the_models_own() -> None:
    planned = Checkpointable(WithLoss(64), mem_limit="1GB")
    assert planned.training_step.__self__ is planned
    planned.predict(torch.randn(8, 64))
    with torch.no_grad():
        assert planned.training_step.__self__ is planned.model
    planned.eval()
    assert planned.training_step.__self__ is planned.model
    assert planned.sequence is None
