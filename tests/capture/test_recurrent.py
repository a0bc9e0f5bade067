"""Recurrent layers in models of any form: planned inside the limit, with the numbers of plain training."""

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.capture.graph.graph_rewrites import draws_from_own_state
from tests.capture.steps import adamw, assert_same_step, assert_trains_inside, compare, limits, planned_for
from tests.checkpointable.steps import square
from tests.fields import raises

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
    plain = copy.deepcopy(model)
    planned = planned_for(
        model, {"ids": IDS, "state": state}, lambda output: cross_entropy(output[0]), optimizer=adamw(model)
    )
    losses = []
    for network in (planned, plain):
        torch.manual_seed(1)
        optimizer, now, found = adamw(network), state, []
        for number in range(2):
            optimizer.zero_grad()
            logits, now = network(ids=IDS.roll(number, 1), state=now)
            loss = cross_entropy(logits)
            loss.backward()
            optimizer.step()
            now = tuple(each.detach() for each in now)
            found.append(loss.detach())
        losses.append(torch.stack(found))
    assert torch.equal(*losses)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))


class Remembering(LanguageModel):
    """Keeps its state as an attribute."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(24, 24, batch_first=True))
        self.state: Any = (torch.zeros(1, 24, 24), torch.zeros(1, 24, 24))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # the state is its own
        logits, state = super().forward(ids, self.state)
        self.state = tuple(each.detach() for each in state)
        return logits


def test_a_state_that_the_model_keeps_is_not_moved_by_measuring() -> None:
    model = Remembering()
    plain = copy.deepcopy(model)
    planned = planned_for(model, {"ids": IDS}, cross_entropy)
    for number in range(2):
        assert_same_step(planned, plain, ids=IDS.roll(number, 1), loss=cross_entropy)


class FrozenEncoder(nn.Module):
    """What comes before the trained layers draws random numbers of its own, and has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(7, 11, num_layers=2, dropout=0.3).requires_grad_(False)
        self.first, self.second = nn.Linear(7, 11), nn.Linear(11, 5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        trained = F.dropout(self.first(value).tanh(), 0.4, self.training)
        return self.second(trained + self.encoder(value)[0])


def test_a_frozen_layer_has_the_numbers_of_plain_training() -> None:
    model, inputs = FrozenEncoder(), {"value": torch.randn(3, 9, 7)}
    plain = copy.deepcopy(model)
    compare(planned_for(model, inputs, optimizer=adamw(model)), plain, inputs, square)


class Packing(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.before, self.layer, self.after = nn.Linear(3, 16), nn.GRU(16, 16), nn.Linear(16, 4)

    def forward(self, value: Any) -> torch.Tensor:
        if self.inside:
            packed = pack_padded_sequence(self.before(value), [3, 2, 1])
            return self.after(pad_packed_sequence(self.layer(packed)[0])[0])
        packed = PackedSequence(self.before(value.data), value.batch_sizes)
        return self.after(self.layer(packed)[0].data)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo, after a break of the graph
def test_a_packed_sequence_is_refused_in_one_sentence() -> None:
    value: Any = torch.randn(3, 3, 3)
    for inside in (True, False):
        with raises(UnsupportedModelError, "packed_sequence"):
            Checkpointable(Packing(inside), loss=square).measure({"value": value})
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
