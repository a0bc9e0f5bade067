"""A small language model, and its blocks."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(value)))))


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
