"""What the models of anchors.py have to do: the operators of a block and of both ends, counted on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_py.estimation.roofline import Work, work_of

aten = torch.ops.aten
Works = Counter[Work]


class Recording(TorchDispatchMode):
    """How often each work is done."""

    def __init__(self) -> None:
        super().__init__()
        self.works: Works = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.works[work_of(func, args, kwargs or {}, out)] += 1
        return out


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads, width), by the operator that CUDA takes."""
    given = (each.transpose(1, 2) for each in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(*given, 0.0, True)[0]
    return out.transpose(1, 2).flatten(2)


class MptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](value)).chunk(3, -1)
        value = value + self.out(causal_attention(*(part.unflatten(-1, (self.heads, -1)) for part in parts)))
        result: torch.Tensor = value + self.down(nn.functional.gelu(self.up(self.norms[1](value))))
        return result


class LlamaBlock(nn.Module):
    """Of Llama 3.1 8B, as torchtitan writes it: rotary embeddings as complex numbers, keys repeated for every head."""

    def __init__(self, width: int = 4096, heads: int = 32, key_heads: int = 8, inner: int = 14_336) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        small = width * key_heads // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, w, bias=False) for w in (width, small, small, width))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        normal = self.norms[0](value)
        query, key = (
            self.rotated(part(normal).unflatten(-1, (heads, -1)))
            for part, heads in ((self.q, self.heads), (self.k, self.key_heads))
        )
        repeats = self.heads // self.key_heads
        other = self.v(normal).unflatten(-1, (self.key_heads, -1))
        key, other = (each.repeat_interleave(repeats, 2) for each in (key, other))
        value = value + self.o(causal_attention(query, key, other))
        normal = self.norms[1](value)
        result: torch.Tensor = value + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))
        return result

    @staticmethod
    def rotated(value: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(value.float().unflatten(-1, (-1, 2)))
        angles = torch.empty(value.shape[1], 1, turned.shape[-1], dtype=torch.complex64)
        return torch.view_as_real(turned * angles).flatten(3).type_as(value)


@cache
def works_of(make: Callable[[], nn.Module], *shape: int) -> tuple[Works, Works]:
    """What a forward and a backward of a block in bfloat16 have to do."""
    torch.set_default_dtype(torch.bfloat16)  # `.to` swaps parameters, which fake ones do not allow
    with FakeTensorMode():
        try:
            block = make()
        finally:
            torch.set_default_dtype(torch.float32)
        value = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        with Recording() as forward:
            out = block(value)
        gradient = torch.empty_like(out)
        with Recording() as backward:
            out.backward(gradient)
    return forward.works, backward.works


@cache
def ends_of(width: int, vocabulary: int, batch: int, length: int) -> Works:
    """What the embedding, the head and the loss have to do, forward and backward."""
    with FakeTensorMode():
        embedding = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
        head = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
        ids = torch.zeros(batch, length, dtype=torch.long)
        with Recording() as both:
            scores = head(embedding(ids))
            nn.functional.cross_entropy(scores.flatten(0, 1).float(), ids.flatten()).backward()
    return both.works
