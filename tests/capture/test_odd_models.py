"""Models of odd forms train with the numbers of plain training, inside the limit: writes, skips, recurrent layers."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.capture.graph.graph_nodes import written_by
from rotor_py.capture.graph.graph_rewrites import _kind_of, draws_from_own_state
from rotor_py.errors import StageChangedError
from rotor_solver import store_all
from tests.capture.steps import assert_same_step, assert_trains_inside, limits, planned_and_plain, planned_for
from tests.checkpointable.steps import Made, Stack, between, planned_at, square, step_peak, without_collector
from tests.fields import logged, raises

WIDTH = 32


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


class Layers(Stack):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers or linears(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = self.step(layer(value))
        return value

    def step(self, value: torch.Tensor) -> torch.Tensor:
        return value.sin()


class Region(nn.Sequential):
    """PyTorch's own recomputation of what draws random numbers, and updates statistics."""

    def forward(self, value: torch.Tensor) -> Any:
        return value + checkpoint(super().forward, value, use_reentrant=False)


def region() -> nn.Module:
    return Region(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))


class Table(Layers):
    """A table made without gradients, and filled with what is known to carry none only by its mode (Pegasus-X)."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layers[0](value)
        with torch.no_grad():
            table = torch.zeros(16, WIDTH)
            table[:8] = torch.arange(WIDTH).type_as(value).sin()
            table[8:] = torch.arange(WIDTH).type_as(value).cos()
        for layer in self.layers[1:]:
            value = layer(value + table).tanh().sin()
        return value


@torch.library.custom_op("rotor_tests::scale_quietly", mutates_args={"value"})
def scale_quietly(value: torch.Tensor) -> None:
    value.mul_(2)


class Quiet(Layers):
    """Writes by an operator whose name does not say so."""

    def step(self, value: torch.Tensor) -> torch.Tensor:
        value = value.sin()
        with torch.no_grad():
            noted = value.detach().clone()
            scale_quietly(noted)
        return (value + noted).exp()


class BiasAside(Layers):
    """Hands on its input, and a bias with it."""

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return value, self.layers[0].bias.tanh().exp()  # type: ignore[union-attr]


class Added(nn.Module):
    """Overwrites what neither it nor the layer before it has made."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        value, bias = pair
        value += bias
        return value.softmax(-1).sin()


def handed_on() -> nn.Module:
    """Scores that are overwritten after a bias has been made (LongT5)."""
    return nn.Sequential(*(each for _ in range(4) for each in (*linears(1), BiasAside(*linears(1)), Added())))


class Scored(Layers):
    """A vmap in which trained tensors from outside are read, and random numbers drawn."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def step(self, value: torch.Tensor) -> torch.Tensor:
        def score(row: torch.Tensor) -> torch.Tensor:
            return (row * self.weight).tanh() * row.sum() * torch.rand_like(row)

        return torch.vmap(score, randomness="different")(value).relu()


class Buffered(Layers):
    """Reads a part of a large buffer, as decoders do that keep the mask of their longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(256, 256).tril())

    def step(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(value @ value.transpose(1, 2) * self.mask[: value.shape[1], : value.shape[1]] @ value)


class BreakingBefore(Layers):
    """A small first graph returns values; the head and the loss have one of their own, which returns large logits."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH)) for _ in range(3)))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = self.first(value)
        seen = torch.cat([value.sin()] * 4)
        torch._dynamo.graph_break()
        value = super().forward(value)
        torch._dynamo.graph_break()
        logits = self.head(value)
        return logits.logsumexp(-1).mean(), logits, seen


class Masked(Layers):
    """Writes after a graph break into what it has made before, as Wav2Vec2 does."""

    def __init__(self) -> None:
        super().__init__(*linears(6))
        self.token = nn.Parameter(torch.randn(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](value)
        torch._dynamo.graph_break()
        hidden[::2] = self.token.sin()
        for layer in self.layers[1:]:
            hidden = layer(hidden).tanh().sin()
        return hidden


class InPart(Masked):
    """Writes into a part of a tensor in an attribute, or through `data`."""

    def __init__(self, through: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mean, self.through = torch.ones(WIDTH), through

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](value)
        self.through(self.mean).mul_(0.5)
        for layer in self.layers[1:]:
            hidden = layer(hidden + self.mean.clone()).tanh().sin()
        return hidden * self.token


def test_a_write_through_data_is_refused() -> None:
    with raises(UnsupportedModelError, "written_through_data"):
        Checkpointable(InPart(lambda mean: mean.data[:8]), {"value": torch.randn(4, WIDTH)}, mem_limit="1GB")


class Queued(Layers):
    """Writes keys into a queue after a graph break, as MoCo does: that graph returns only its input."""

    def __init__(self) -> None:
        super().__init__(*linears(6))
        self.register_buffer("queue", torch.randn(64, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = super().forward(value) + self.queue.clone().mean(0)
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.queue[:8] = self.layers[0](value[:8]).detach()
        return value


class Setting(Layers):
    """Runs operators in other settings, which hold for the whole process."""

    def step(self, value: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        noise = torch.randn(WIDTH)
        torch.set_default_dtype(torch.float32)
        with torch.inference_mode():
            scale = value.square().mean()
        made = (value * scale.clone() + noise.float()).view(-1, 1, 16, WIDTH)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(made, made.sin(), made, dropout_p=0.1).view_as(value)


class Squash(torch.autograd.Function):
    """Saves inputs, an output, and a tensor of its own that is no output; another output has no gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: torch.Tensor, times: float) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.tanh(value * factor * times)
        ctx.save_for_backward(value, factor, made)
        ctx.slope = 1 - made * made
        ctx.times = times
        count = torch.ones((), dtype=torch.int64)
        ctx.mark_non_differentiable(count)
        return made, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        value, factor, made = ctx.saved_tensors
        inner = gradients[0] * ctx.slope * ctx.times
        return inner * factor + 0 * made, (inner * value).sum(0), None


class Squashed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def step(self, value: torch.Tensor) -> torch.Tensor:
        return value + Squash.apply(value, self.factor, 0.5)[0]  # type: ignore[no-untyped-call]  # torch's


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


class Reversing(Layers):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers[1](Reverse.apply(super().forward(value)))  # type: ignore[no-untyped-call]  # torch's


class Drawing(Layers):
    """Draws after a dropout, by operators whose names do not say so, and that need no gradient."""

    def step(self, value: torch.Tensor) -> torch.Tensor:
        rows = torch.ones(1, 4, 8)
        drawn = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5).sum()
        return F.dropout(value, 0.2).sin() * torch.ones(WIDTH).geometric_(0.5) * (1 + drawn)


class ReadsByTurns(Layers):
    """Each of the stages reads one weight twice, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__(*linears(6))
        self.weight, self.memory, self.how = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), nn.GRU(WIDTH, WIDTH), how

    def step(self, value: torch.Tensor) -> torch.Tensor:
        value = value.tanh()
        return value + self.read(value)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "operators":
                return torch.tanh(value @ self.weight) @ self.weight
            case "an operator":
                return value @ (self.weight * self.weight)
            case "a region":
                return torch.vmap(lambda row: torch.tanh(row @ self.weight) @ self.weight)(value)
            case _:
                return self.memory(value.view(8, -1, WIDTH))[0].reshape(value.shape)


class TrainedBuffer(Made):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layer(value) * self.scale


def trained_buffers() -> nn.Module:
    scales = (nn.Buffer(torch.rand(WIDTH, requires_grad=True)) for _ in range(4))
    return Layers(*(TrainedBuffer(layer=nn.Linear(WIDTH, WIDTH), scale=scale) for scale in scales))


class Skipping(Layers):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        kept = value = self.layers[0](value).tanh()
        for layer in self.layers[1:]:
            value = F.silu(layer(value)).sin()
        return value * kept


class Corrected(nn.Linear):
    """Takes a step along a gradient that the forward computes."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        energy = lambda weight: torch.tanh(value @ weight).square().mean()  # noqa: E731
        match self.how:
            case "grad":
                found = torch.func.grad(energy)(self.weight)
            case "vjp":
                made, pull = torch.func.vjp(energy, self.weight)
                (found,) = pull(torch.ones_like(made))
            case "autograd":
                (found,) = torch.autograd.grad(energy(self.weight), self.weight, create_graph=True)
            case _:
                found = torch.func.grad(lambda weight: torch.linalg.cholesky(-weight @ weight.T).sum())(self.weight)
        return torch.tanh(value @ (self.weight - 0.1 * found))


class Viewed(Layers):
    def step(self, value: torch.Tensor) -> torch.Tensor:
        return value.sin().sin().view_as(value)


class CarriedView(Layers):
    """Returns a view that its last stage makes of a tensor from an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = self.layers[0](value).sin().cos()
        wide = self.wide(value).exp()
        value = value + wide[..., :WIDTH].sin()
        for layer in self.layers[1:]:
            value = layer(value).sin().cos()
        return value, wide.view(-1, 8 * WIDTH)


class FrozenEncoder(Layers):
    """What comes before the trained layers draws random numbers of its own, and has no gradient."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        trained = F.dropout(self.layers[1](value).tanh(), 0.4, self.training)
        return self.layers[2](trained + self.layers[0](value)[0])


def frozen_encoder() -> nn.Module:
    encoder = nn.GRU(WIDTH, 11, num_layers=2, dropout=0.3).requires_grad_(False)
    return FrozenEncoder(encoder, nn.Linear(WIDTH, 11), nn.Linear(11, 5))


@pytest.mark.parametrize(("how", "error"), [("autograd", UnsupportedModelError), ("failing", RuntimeError)])
def test_gradients_inside_of_a_forward_that_fail_are_refused_and_leave_hooks_usable(how: str, error: Any) -> None:
    with pytest.raises(error) if how == "failing" else raises(error, "backward_in_forward"):
        Checkpointable(Layers(Corrected(how)), {"value": torch.randn(64, WIDTH)}, mem_limit="1GB")
    checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "filled table": (Table, (64, 16, WIDTH), 0),
    "quiet writes": (Quiet, (64, 16, WIDTH), 0),
    "overwritten input of a stage": (handed_on, (64, 16, WIDTH), 0),
    "vmap with random numbers": (Scored, (512, WIDTH), 0),
    "settings that the model makes": (Setting, (16, 16, WIDTH), 0),
    "frozen encoder": (frozen_encoder, (3, 9, WIDTH), 0),
    "large buffer": (Buffered, (4, 16, WIDTH), 0.97),
    "early and late graph": (BreakingBefore, (256, WIDTH), 0),
    "queue after a break": (Queued, (512, WIDTH), 0),
    "overwritten in part": (lambda: InPart(lambda mean: mean[:8]), (512, WIDTH), 0),
    "overwritten after a break": (Masked, (512, WIDTH), 0),
    "checkpointed regions": (lambda: Layers(*(region() for _ in range(4))), (512, WIDTH), 0),
    "chain of checkpointed regions": (lambda: nn.Sequential(*(region() for _ in range(4))), (512, WIDTH), 0),
    "draws by other names": (Drawing, (256, WIDTH), 0),
    "own function": (Reversing, (256, WIDTH), 0),
    "gradients by transforms": (lambda: Layers(*map(Corrected, ["grad", "vjp"] * 2)), (256, WIDTH), 0.97),
    "chain with gradients": (lambda: nn.Sequential(*map(Corrected, ["autograd"] * 3), nn.Tanh()), (256, WIDTH), 0),
    **{
        f"weight that {how} read by turns": (partial(ReadsByTurns, how), (256, WIDTH), 0)
        for how in ("operators", "an operator", "a region", "a recurrent layer")
    },
    "trained buffers": (trained_buffers, (256, WIDTH), 0),
    "skip connection": (lambda: Skipping(*linears(9)), (256, WIDTH), 0.97),
    "view as output": (Viewed, (16, 16, WIDTH), 0.97),
    "view of a carried tensor": (CarriedView, (16, 16, WIDTH), 0),
}
"""Model, shape of its input, and the least share of the predicted peak that is measured."""


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # TorchDynamo does, for a moment
@pytest.mark.parametrize("case", CASES)
def test_a_model_of_odd_form_trains_inside_the_limit_with_the_same_numbers(case: str) -> None:
    make, shape, exact = CASES[case]
    model = make()
    name = "input" if type(model) is nn.Sequential else "value"
    shares = (0.0, 0.5) if exact else (0.0,)
    loss = lambda output: square(output[0] if isinstance(output, tuple) else output)  # noqa: E731
    planned = assert_trains_inside(model, {name: torch.randn(shape)}, loss, shares, exact)
    if case == "skip connection":
        least, whole = limits(planned)
        assert least < 0.85 * whole
        assert len(planned.inspection_values.carried) == 1
    if case == "large buffer":
        assert planned.budget.fixed.buffers == 256 * 256 * 4
        assert planned.budget.fixed.batch in (0, 4 * 16 * WIDTH * 4)


def test_a_weight_that_stages_pass_on_is_compared_like_their_own() -> None:
    value = torch.randn(256, WIDTH)
    planned = planned_for(ReadsByTurns("operators"), {"value": value})
    output = planned(value)
    planned.model.weight.data = 2 * planned.model.weight.data
    with raises(StageChangedError, "stage_changed"):
        square(output).backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # TorchDynamo does, for a moment
def test_a_step_with_own_autograd_functions_keeps_to_the_plan_without_the_collector() -> None:
    model, value = Squashed(), torch.randn(256, WIDTH)
    with without_collector():
        assert_trains_inside(model, {"value": value}, shares=(0.0, 0.4, 1.0), exact=0.97)
    planned = Checkpointable(Squashed(), mem_limit="1GB")
    (gradient,) = torch.autograd.grad(planned(value.requires_grad_()).sum(), value, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        gradient.square().sum().backward()


class Caching(Layers):
    """Like T5, whose decoder has a configuration of its own: it fills a cache unless the argument says no."""

    config = SimpleNamespace(use_cache=False)

    def forward(self, value: torch.Tensor, use_cache: bool | None = None) -> tuple[torch.Tensor, ...]:
        made = super().forward(value)
        return (made,) if use_cache is False else (made, self.layers[0](value))


def test_no_part_of_a_model_fills_a_cache() -> None:
    planned = Checkpointable(Caching(), mem_limit="1GB", loss=lambda made: square(made[0]))
    assert len(planned(torch.randn(8, WIDTH))) == 1


def test_a_number_in_a_region_is_not_taken_for_an_input() -> None:
    with_input, with_number, again = (
        fx.symbolic_trace(region).graph
        for region in (lambda a, b: (a + b) * b, lambda a, b: (a + 1) * b, lambda a, b: (a + b) * b)
    )
    assert _kind_of(with_input) == _kind_of(again) != _kind_of(with_number)


class Also(Scored):
    """Another function inside of vmap, which is made for the batch."""

    def __init__(self, inner: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__(*linears(1))
        self.inner = inner

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = super().forward(value)
        return torch.vmap(self.inner(made))(made)


def writing(made: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    kept = made.detach().clone()
    return lambda row: kept.mul_(2).sum() * row.sum()


@pytest.mark.filterwarnings("ignore")
def test_another_function_inside_of_vmap_is_another_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = Also(lambda made: torch.exp if len(made) < 8 else torch.sin)
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, {"value": torch.randn(16, WIDTH)}, mem_limit="1GB", loss=square)
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for rows in (6, 16):
            assert_same_step(planned, plain, value=torch.randn(rows, WIDTH))
    assert len(logged(caplog, "planning_again")) == 1  # for few rows, and once


@pytest.mark.filterwarnings("ignore")
def test_an_error_inside_of_vmap_leaves_no_transform_on_and_a_write_to_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        Checkpointable(Also(lambda made: lambda row: row[torch.tensor(99)]), {"value": torch.randn(4, WIDTH)})
    assert torch._C._functorch.maybe_current_level() is None
    with raises(UnsupportedModelError, "in_place_input"):
        Checkpointable(Also(writing), {"value": torch.randn(4, WIDTH)})


@pytest.mark.parametrize(
    ("write", "overwritten"),
    [
        (lambda value: F.relu(value, True), ["value"]),
        (lambda value: F.relu(value, False), []),
        (lambda value: F.dropout(value, 0.1, True, True), ["value"]),
        (lambda value: F.hardtanh(value, inplace=True), ["value"]),
        (lambda value: torch._foreach_add_([value.neg(), value], 1), ["neg", "value"]),
        (lambda value: torch.add(torch.zeros(1), 1, out=value), ["value"]),
    ],
)
def test_overwritten_tensors_are_found_in_any_notation(write: Callable[[Any], Any], overwritten: list[str]) -> None:
    (*_, last, _) = fx.symbolic_trace(write).graph.nodes
    assert [node.name for node in written_by(last)] == overwritten


class Normalized(Layers):
    def __init__(self, momentum: float | None = 0.1, blocks: int = 3) -> None:
        super().__init__(*linears(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH, momentum=momentum) for _ in range(blocks))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            value = value + norm(layer(value)).relu()
        return value


class OwnNorm(nn.BatchNorm1d):
    """Of a type of its own, which need not do what other batch norms do."""


def chain() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), OwnNorm(WIDTH)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def test_copies_of_statistics_of_equal_stages_are_inside_the_limit() -> None:
    batch = torch.randn(8, WIDTH)
    planned = Checkpointable(Normalized(blocks=8), batch, loss=square)
    for share in (0.1, 0.0):
        planned.compute_sequence(limit := between(planned, share))
        step_peak(planned, batch)
        assert step_peak(planned, batch) <= limit
    assert planned.sequence != store_all(planned.build_chain())


@pytest.mark.parametrize("make", [Normalized, lambda: Normalized(momentum=None), chain])
def test_statistics_that_did_not_move_when_they_were_measured_move_once(make: Callable[[], nn.Module]) -> None:
    plain = make()
    # The mean of zeros is what the running mean begins with.
    planned = planned_at(0.0, copy.deepcopy(plain), torch.zeros(64, WIDTH))
    for _ in range(2):
        assert_same_step(planned, plain, torch.randn(64, WIDTH))


WORDS = 60
IDS = torch.randint(WORDS, (24, 4), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(WORDS, (24, 4), generator=torch.Generator().manual_seed(1))


class LanguageModel(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, layer.input_size)
        self.layer = layer
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor, state: Any = None) -> Any:
        output, following = self.layer(self.embedding(ids), state)
        logits = self.head(output)
        return logits if state is None else (logits, following)


pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), LABELS)


PROJECTED = {"proj_size": 8, "dropout": 0.2, "bidirectional": True}


@pytest.mark.parametrize("options", [{"dropout": 0.3}, pytest.param(PROJECTED, marks=pytest.mark.slow)])
def test_training_is_that_of_the_model_and_stays_inside_the_limit(options: dict[str, Any]) -> None:
    model = LanguageModel(nn.LSTM(24, 24, num_layers=2, batch_first=True, **options))
    planned = assert_trains_inside(model, {"ids": IDS}, cross_entropy, exact=0.98)
    assert not torch._dynamo.config.allow_rnn  # the user's setting
    if options is not PROJECTED:
        least, whole = limits(planned)
        assert least < 0.75 * whole
        assert sum(name.startswith("layer") for name in planned.names) >= 2, "a plan may store some layers of a module"


def test_a_state_is_carried_from_batch_to_batch() -> None:
    model = LanguageModel(nn.LSTM(24, 24, batch_first=True))
    state = (torch.zeros(1, 24, 24), torch.zeros(1, 24, 24))
    loss = lambda output: cross_entropy(output[0])  # noqa: E731
    planned, plain = planned_and_plain(model, {"ids": IDS, "state": state}, loss)
    for number in range(2):
        batch = {"ids": IDS.roll(number, 1), "state": state}
        assert_same_step(planned, plain, **batch, loss=loss)  # the states that follow are equal as well
        state = tuple(each.detach() for each in plain(**batch)[1])


class Remembering(LanguageModel):
    def __init__(self) -> None:
        super().__init__(nn.LSTM(24, 24, batch_first=True))
        self.state: Any = (torch.zeros(1, 24, 24), torch.zeros(1, 24, 24))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # the state is its own
        logits, state = super().forward(ids, self.state)
        self.state = tuple(each.detach() for each in state)
        return logits


def test_a_state_that_the_model_keeps_is_not_moved_by_measuring() -> None:
    model = Remembering()
    planned, plain = planned_and_plain(model, {"ids": IDS}, cross_entropy)
    for number in range(2):
        assert_same_step(planned, plain, ids=IDS.roll(number, 1), loss=cross_entropy)


class Packing(Made):
    def forward(self, value: Any) -> torch.Tensor:
        if self.inside:
            packed = pack_padded_sequence(self.before(value), [3, 2, 1])
            return self.after(pad_packed_sequence(self.layer(packed)[0])[0])
        packed = PackedSequence(self.before(value.data), value.batch_sizes)
        return self.after(self.layer(packed)[0].data)


def test_a_packed_sequence_is_refused_in_one_sentence() -> None:
    value: Any = torch.randn(3, 3, 3)
    for inside in (True, False):
        with raises(UnsupportedModelError, "packed_sequence"):
            model = Packing(before=nn.Linear(3, 16), layer=nn.GRU(16, 16), after=nn.Linear(16, 4), inside=inside)
            Checkpointable(model, {"value": value}, loss=square)
        value = pack_sequence([torch.randn(length, 3) for length in (3, 2, 1)])


@pytest.mark.parametrize(
    ("layers", "dropout", "training"), [(2, 0.1, True), (1, 0.1, True), (2, 0.0, True), (2, 0.1, False)]
)
def test_dropout_of_cudnn_is_known(layers: int, dropout: float, training: bool) -> None:
    graph = fx.Graph()
    value, state, weight = (graph.placeholder(name) for name in ("value", "state", "weight"))
    given = (value, state, [weight] * 4 * layers, True, layers, dropout, training, False, False)
    node = graph.call_function(torch.gru, given)
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            node.meta["example_value"] = (torch.empty(5, 2, 3, device=device), torch.empty(layers, 2, 3, device=device))
        assert draws_from_own_state(node) is (device == "cuda" and layers == 2 and dropout > 0 and training)
