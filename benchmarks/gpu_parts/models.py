"""The models of the GPU benchmark, of plain PyTorch: nothing is downloaded, nothing but torch is needed.

Each can be tiny, for a CPU. Chains are `nn.Sequential`s; GPT-2 and the U-Net are written as people write them, so that
TorchDynamo captures them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from rotor_py.models.resnet import BasicBlock, ResidualBlock, ResNet, resnet50


@dataclass(frozen=True)
class Case:
    """A model, its batches, its loss and its optimizer, in the precision in which people train it."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], torch.Tensor]
    loss: Callable[[torch.Tensor], torch.Tensor]
    """Of the output alone: targets are numbers that nobody looks at."""
    blocks: Callable[[nn.Module], list[tuple[nn.Module, str]]]
    """What people checkpoint block by block: parents, and the names of their children."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    largest: int
    """Elements of the largest tensor, for each sample: with 2³¹ of them, some kernels of cuDNN and ATen give up."""
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    chain: bool = False
    """Whether the model is an `nn.Sequential`, which `checkpoint_sequential` needs."""

    def new(self, batch: int, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
        """A model and a batch on `device`, in the dtype and the layout of the case; fake ones in a FakeTensorMode."""
        torch.set_default_dtype(self.dtype)  # `.to` swaps parameters, which fake ones do not allow
        try:
            with torch.device(device):
                model = self.make()
        finally:
            torch.set_default_dtype(torch.float32)
        sample = self.batch(batch).to(device)
        if sample.dtype.is_floating_point:
            sample = sample.to(self.dtype)
        if sample.dim() == 4:
            sample = sample.contiguous(memory_format=torch.channels_last)
            for parent in model.modules():
                for name, weight in parent.named_parameters(recurse=False):
                    if weight.dim() == 4:
                        turned = weight.detach().contiguous(memory_format=torch.channels_last)
                        setattr(parent, name, nn.Parameter(turned))
        return model, sample

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if self.autocast else nullcontext()


class Attention(nn.Module):
    """Causal, with as many heads of keys as of queries or fewer; with rotary positions or without."""

    def __init__(self, width: int, heads: int, key_heads: int, *, rotary: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.rotary = heads, key_heads, rotary
        self.size = width // heads
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * self.size, bias=not rotary)
        self.out = nn.Linear(width, width, bias=not rotary)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(value).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, other = parts.split([self.heads, self.key_heads, self.key_heads], 1)
        if self.rotary:
            query, key = rotated(query), rotated(key)
        mixed = F.scaled_dot_product_attention(
            query, key, other, is_causal=True, enable_gqa=self.heads != self.key_heads
        )
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def rotated(value: torch.Tensor) -> torch.Tensor:
    length, width = value.shape[-2:]
    speeds = 10_000 ** (-torch.arange(0, width, 2, device=value.device) / width)
    angles = torch.outer(torch.arange(length, device=value.device), speeds)
    sine, cosine = angles.sin().to(value.dtype), angles.cos().to(value.dtype)
    one, other = value.chunk(2, -1)
    return torch.cat((one * cosine - other * sine, other * cosine + one * sine), -1)


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, heads, rotary=False)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self.attention(self.norms[0](value))
        result: torch.Tensor = value + self.inner(self.norms[1](value))
        return result


class Gpt2(nn.Module):
    """Radford et al., 2019. The head is the embedding, transposed."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            value = block(value)
        return F.linear(self.norm(value), self.words.weight)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, key_heads, rotary=True)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + self.attention(self.norms[0](value))
        normal = self.norms[1](value)
        result: torch.Tensor = value + self.down(F.silu(self.gate(normal)) * self.up(normal))
        return result


class DoubleConvolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for given in (inputs, outputs):
            layers += [nn.Conv2d(given, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """Ronneberger, Fischer, Brox, 2015, with padding and batch norms."""

    def __init__(self, width: int, levels: int, classes: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(map(DoubleConvolution, [3, *widths[:-2]], widths[:-1]))
        self.bottom = DoubleConvolution(widths[-2], widths[-1])
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in widths[-2::-1])
        self.up = nn.ModuleList(DoubleConvolution(2 * each, each) for each in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.down:
            skipped.append(block(picture))
            picture = F.max_pool2d(skipped[-1], 2)
        picture = self.bottom(picture)
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            picture = block(torch.cat([skipped.pop(), enlarge(picture)], 1))
        result: torch.Tensor = self.head(picture)
        return result


def classified(output: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, in 32 bits, with the class 0 everywhere: of pictures, of pixels, of words."""
    scores = output.float()
    if scores.dim() == 3:
        scores = scores.flatten(0, 1)
    return F.cross_entropy(scores, scores.new_zeros(scores.shape[0], *scores.shape[2:], dtype=torch.long))


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def children_of(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, str]]:
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]
    assert found, kind
    return found


def cases(*, tiny: bool) -> dict[str, Case]:
    """By name. Tiny ones take a CPU about a second for each step."""
    length, vocabulary = (32, 128) if tiny else (1024, 50_304)
    width, layers, heads = (32, 2, 2) if tiny else (1024, 24, 16)
    long, words = (32, 128) if tiny else (4096, 128_256)
    side, pixels = (32, 32) if tiny else (224, 512)

    def pictures(size: int) -> Callable[[int], torch.Tensor]:
        return lambda batch: torch.randn(batch, 3, size, size)

    def tokens(count: int, most: int) -> Callable[[int], torch.Tensor]:
        return lambda batch: torch.randint(most, (batch, count))

    def llama() -> nn.Module:
        size, count, most, few, inner = (32, 4, 4, 2, 64) if tiny else (2048, 16, 32, 8, 8192)
        blocks = (LlamaBlock(size, most, few, inner) for _ in range(count))
        head = nn.Sequential(nn.RMSNorm(size), nn.Linear(size, words, bias=False))
        return nn.Sequential(nn.Embedding(words, size), *blocks, *head)

    found = [
        Case("ResNet-50", lambda: ResNet(BasicBlock, (1, 1, 1, 1)) if tiny else resnet50(),
             pictures(side), classified, lambda model: children_of(model, ResidualBlock), momentum, 64 * 112 * 112,
             autocast=True, chain=True),
        Case("GPT-2 medium", lambda: Gpt2(width, layers, heads, vocabulary, length), tokens(length, vocabulary),
             classified, lambda model: children_of(model, GptBlock), adamw,
             length * vocabulary, torch.bfloat16),
        Case("Llama 1B", llama, tokens(long, words), classified, lambda model: children_of(model, LlamaBlock), adamw,
             long * words, torch.bfloat16, chain=True),
        Case("U-Net", lambda: UNet(4 if tiny else 64, 4), pictures(pixels),
             classified, lambda model: children_of(model, DoubleConvolution), adamw,
             128 * pixels * pixels, autocast=True),
    ]  # fmt: skip
    return {case.name: case for case in found}
