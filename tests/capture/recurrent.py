"""Models with recurrent layers, as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 60


class LanguageModel(nn.Module):
    """Words in, a prediction of the next word out, by whatever recurrent layer."""

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


class Stacked(nn.Module):
    """Modules of one layer each, with dropout between them."""

    def __init__(self, layers: int = 2, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.layers = nn.ModuleList(kind(24, 24, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(24, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value = self.embedding(ids)
        for layer in self.layers:
            value = F.dropout(layer(value)[0], 0.2, self.training)
        return self.head(value)


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
    """An encoder that reads both ways, and a decoder that begins with its state and looks back at its output."""

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
