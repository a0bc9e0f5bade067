"""A small language model, and its blocks."""

import torch
from torch import nn

from tests.checkpointable.steps import Residual


class Block(Residual):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        inside = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        super().__init__(nn.LayerNorm(width), *inside, nn.Dropout(dropout) if dropout else nn.Identity())


class Language(nn.Module):
    """No chain, so it is captured; its embedding is its head, too, if it is `tied`."""

    def __init__(self, *, tied: bool, blocks: int = 4, width: int = 48, words: int = 120) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        value = self.embedding(words)
        for block in self.blocks:
            value = block(value)
        return self.head(value)
