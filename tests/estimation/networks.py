"""A residual block, whose parts can be stored apart from each other."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 256


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.drop(self.down(nn.functional.gelu(self.up(self.norm(value)))))
