"""Recurrent layers in models of any form: planned inside the limit, with the numbers of plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.capture.graph.graph_rewrites import draws_from_own_state
from tests.capture.steps import adamw, assert_same_gradients, compare, limits
from tests.fields import raises

WORDS = 60
IDS = torch.randint(WORDS, (16, 32), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(WORDS, (16, 32), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(4, 1, 16, 32, generator=torch.Generator().manual_seed(2))


class LanguageModel(nn.Module):
    def __init__(self, layer: nn.RNNBase, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, layer.input_size)
        self.layer = layer
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, state: Any = None) -> Any:
        output, following = self.layer(self.embedding(ids), state)
        logits = self.head(output)
        return logits if state is None else (logits, following)


class Recognizer(nn.Module):
    """Convolutions over a line of text, a GRU over its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.layer = nn.GRU(32, 24, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(48, WORDS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        columns = self.features(images).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.layer(columns)[0]).log_softmax(-1)


class Translator(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.encoder = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.bridges = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.decoder = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.query, self.head = nn.Linear(width, 2 * width), nn.Linear(3 * width, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, state = self.encoder(self.source(source))
        first = tuple(
            bridge(torch.cat([each[0::2], each[1::2]], -1)).tanh()
            for bridge, each in zip(self.bridges, state, strict=True)
        )
        output, _ = self.decoder(self.target(target), first)
        weights = (self.query(output) @ memory.transpose(1, 2)).softmax(-1)
        return self.head(torch.cat([output, weights @ memory], -1))


class Cells(nn.Module):
    """A cell that is called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(WORDS, 16), nn.LSTMCell(16, 16), nn.Linear(16, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value = self.embedding(ids)
        state = value.new_zeros(len(ids), 16), value.new_zeros(len(ids), 16)
        outputs = []
        for column in value.unbind(1):
            state = self.cell(column, state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, 1))


pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), LABELS)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def language_model(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    return lambda: LanguageModel(kind(24, 24, **options))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[[Any], torch.Tensor]]] = {
    "lstm of layers": (
        language_model(nn.LSTM, num_layers=3, dropout=0.3, batch_first=True), {"ids": IDS}, cross_entropy
    ),
    "bidirectional lstm": (
        language_model(nn.LSTM, num_layers=2, dropout=0.3, bidirectional=True), {"ids": IDS}, cross_entropy
    ),
    "projected lstm": (language_model(nn.LSTM, num_layers=2, proj_size=8), {"ids": IDS}, mean_square),
    "rnn of layers": (
        language_model(nn.RNN, num_layers=2, dropout=0.3, batch_first=True, nonlinearity="relu"),
        {"ids": IDS}, mean_square,
    ),
    "convolutions and gru": (Recognizer, {"images": IMAGES}, mean_square),
    "translator": (Translator, {"source": IDS, "target": LABELS[:, :20]}, mean_square),
    "cells": (Cells, {"ids": IDS[:, :8]}, mean_square),
}  # fmt: skip

SLOW = ("bidirectional lstm", "projected lstm", "translator")


def planned_for(
    model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], torch.Tensor], share: float = 0.0
) -> Checkpointable:
    planned = Checkpointable(model, loss=loss, optimizer=adamw(model), fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    planned.compute_sequence(int(least + share * (whole - least)))
    return planned


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_training_is_that_of_the_model_and_stays_inside_the_limit(case: str) -> None:
    make, inputs, loss = CASES[case]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    planned = planned_for(model, inputs, loss)
    least, whole = limits(planned)
    for limit in dict.fromkeys((least, (least + whole) // 2, whole)):
        planned.compute_sequence(limit)
        assert planned.budget is not None
        predicted = planned.budget.peak_bytes(planned.sequence)
        assert 0.98 * predicted <= compare(planned, plain, inputs, loss) <= limit
    assert not torch._dynamo.config.allow_rnn  # the user's setting


@pytest.mark.parametrize("case", ["lstm of layers", "bidirectional lstm"])
def test_a_plan_stores_some_layers_of_a_recurrent_module_and_not_others(case: str) -> None:
    make, inputs, loss = CASES[case]
    planned = planned_for(make(), inputs, loss)
    least, whole = limits(planned)
    assert least < 0.75 * whole
    assert planned.inspection_values is not None
    assert sum(name.startswith("layer") for name in planned.inspection_values.names) >= 2


@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_a_state_is_carried_from_batch_to_batch(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(24, 24, num_layers=2, dropout=0.2, batch_first=True)
    model = LanguageModel(layer)
    zeros = torch.zeros(2, 16, 24)
    state = (zeros, zeros.clone()) if kind is nn.LSTM else zeros
    plain = copy.deepcopy(model)
    planned = planned_for(model, {"ids": IDS, "state": state}, lambda output: cross_entropy(output[0]))
    losses = []
    for network in (planned, plain):
        torch.manual_seed(1)
        optimizer, now, found = adamw(network), state, []
        for number in range(3):
            optimizer.zero_grad()
            logits, now = network(ids=IDS.roll(number, 1), state=now)
            loss = cross_entropy(logits)
            loss.backward()
            optimizer.step()
            now = tuple(each.detach() for each in now) if isinstance(now, tuple) else now.detach()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    assert torch.equal(*losses)
    assert all(map(torch.equal, planned.parameters(), plain.parameters()))


class Remembering(LanguageModel):
    """Keeps its state as an attribute."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(24, 24, num_layers=2, batch_first=True))
        self.state: Any = (torch.zeros(2, 16, 24), torch.zeros(2, 16, 24))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # the state is its own
        logits, state = super().forward(ids, self.state)
        self.state = tuple(each.detach() for each in state)
        return logits


def test_a_state_that_the_model_keeps_is_not_moved_by_measuring() -> None:
    torch.manual_seed(0)
    model = Remembering()
    plain = copy.deepcopy(model)
    planned = planned_for(model, {"ids": IDS}, cross_entropy)
    for number in range(2):
        losses = [cross_entropy(network(ids=IDS.roll(number, 1))) for network in (planned, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert_same_gradients(planned, plain)


class FrozenEncoder(nn.Module):
    """What comes before the trained layers draws random numbers of its own, and has no gradient."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.LSTM(7, 11, num_layers=2, dropout=dropout).requires_grad_(False)
        self.first, self.second = nn.Linear(7, 11), nn.Linear(11, 5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        trained = F.dropout(self.first(value).tanh(), 0.4, self.training)
        return self.second(trained + self.encoder(value)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_frozen_layer_has_the_numbers_of_plain_training(dropout: float) -> None:
    torch.manual_seed(0)
    model, inputs = FrozenEncoder(dropout), {"value": torch.randn(9, 3, 7)}
    plain = copy.deepcopy(model)
    compare(planned_for(model, inputs, mean_square), plain, inputs, mean_square)


class Packing(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.before, self.layer, self.after = nn.Linear(3, 16), nn.GRU(16, 16), nn.Linear(16, 4)

    def forward(self, value: Any) -> torch.Tensor:
        if self.inside:
            packed = pack_padded_sequence(self.before(value), [9, 5, 4])
            return self.after(pad_packed_sequence(self.layer(packed)[0])[0])
        packed = PackedSequence(self.before(value.data), value.batch_sizes)
        return self.after(self.layer(packed)[0].data)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo, after a break of the graph
@pytest.mark.parametrize("inside", [True, False])
def test_a_packed_sequence_is_refused_in_one_sentence(inside: bool) -> None:
    value: Any = torch.randn(9, 3, 3) if inside else pack_sequence([torch.randn(length, 3) for length in (9, 5, 4)])
    with raises(UnsupportedModelError, "packed_sequence"):
        Checkpointable(Packing(inside), loss=mean_square).measure({"value": value})


@pytest.mark.parametrize(
    ("layers", "dropout", "training"), [(2, 0.1, True), (1, 0.1, True), (2, 0.0, True), (2, 0.1, False)]
)
def test_dropout_of_cudnn_is_known(layers: int, dropout: float, training: bool) -> None:
    graph = fx.Graph()
    value, state, weight = (graph.placeholder(name) for name in ("value", "state", "weight"))
    node = graph.call_function(
        torch.gru, (value, state, [weight] * 4 * layers, True, layers, dropout, training, False, False)
    )
    for device, expected in (("cpu", False), ("cuda", layers == 2 and dropout > 0 and training)):
        with FakeTensorMode():
            node.meta["example_value"] = (torch.empty(5, 2, 3, device=device), torch.empty(layers, 2, 3, device=device))
        assert draws_from_own_state(node) is expected
