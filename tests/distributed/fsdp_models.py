"""Models, and ways to apply `fully_shard` to them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.capture.test_partial_saving import NewGelu, Odd
from tests.distributed.processes import mesh

BATCH, LENGTH, WIDTH = 8, 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        made = self.narrow(nn.functional.gelu(self.wide(self.norm(value))) * scale)
        return value + nn.functional.dropout(made, 0.1, self.training)


class Skips(nn.Module):
    """Blocks, the first of which is connected to the last over all in between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4 * WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = kept = self.blocks[0](self.enter(value), scale=self.scale)
        for block in self.blocks[1:-1]:
            value = block(value, scale=self.scale)
        return self.head(self.blocks[-1](value + kept, scale=self.scale))


class Twice(nn.Module):
    """One block is used twice; the first layers, and most of the last block, are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.blocks[3].requires_grad_(False).norm.requires_grad_(True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value, scale = self.first(value), value.new_ones(4 * WIDTH)
        for number in (0, 1, 2, 1, 3):
            value = self.blocks[number](value, scale=scale)
        return self.head(value)


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    drawn: dict[str, Any] = {"attn_implementation": "eager", "attention_dropout": 0.1, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **drawn, "num_attention_heads": 2, **options}))


class Otherwise(NewGelu):
    """A block that saves less where it is captured."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.norm(value).exp()
        return super().forward(value)


def chain(*first: type[NewGelu]) -> nn.Sequential:
    return nn.Sequential(*(kind() for kind in (*first, NewGelu, NewGelu, NewGelu)[:4]), nn.Linear(WIDTH, 4))


def plain_chain() -> nn.Sequential:
    wide = 4 * WIDTH
    layers = (nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, WIDTH))
    return nn.Sequential(*(nn.Sequential(*copy.deepcopy(layers)) for _ in range(6)), nn.Linear(WIDTH, 4))


def sharded_alone(model: Any, layer: dict[str, Any], whole: dict[str, Any]) -> nn.Module:
    """Each layer by itself, and what is left with the model: as most people do it."""
    if isinstance(model, nn.Sequential):
        layers = list(model)[:-1]
    else:
        layers = getattr(model, "blocks", None) or model.model.layers
    for each in layers:
        fully_shard(each, **layer)
    return fully_shard(model, **{**layer, **whole})


def sharded_together(model: Any, layer: dict[str, Any], whole: dict[str, Any]) -> nn.Module:
    """As torchtitan does it: the first layer alone, the last ones together, and nothing with the model."""
    fully_shard(model.enter, **layer)
    fully_shard([model.blocks[-1], model.head], **{**layer, "reshard_after_forward": False})
    for each in model.blocks[:-1]:
        fully_shard(each, **layer)
    return fully_shard(model, **{**layer, **whole})


def part_of_a_layer(model: Any, layer: dict[str, Any], whole: dict[str, Any]) -> nn.Module:
    fully_shard(model[2].inner, **layer)
    return sharded_alone(model, layer, whole)


def sharded_in_parts(model: Any, layer: dict[str, Any], _: dict[str, Any]) -> nn.Module:
    """Groups inside of groups, and none for the whole model."""
    for each in model.blocks:
        fully_shard(each.wide, **layer)
        fully_shard(each, **layer)
    fully_shard(model.head, **layer)
    fully_shard(model.enter, **layer)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., nn.Module]]] = {
    "chain": (plain_chain, sharded_alone),
    "layers": (chain, sharded_alone),
    "odd layers": (partial(chain, Odd, Otherwise), part_of_a_layer),
    "tied llama": (partial(llama, tie_word_embeddings=True, num_hidden_layers=1), sharded_alone),
    "skips": (Skips, sharded_alone),
    "skips together": (Skips, sharded_together),
    "skips in parts": (Skips, sharded_in_parts),
    "twice": (Twice, sharded_alone),
}


def mixed(**options: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **options)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "kept": ({"reshard_after_forward": False}, {}),
    "mixed": ({"mp_policy": mixed()}, {}),
    "mixed, full out": ({"mp_policy": mixed()}, {"mp_policy": mixed(output_dtype=torch.float32)}),
}
"""For every layer, and what is different for the whole model."""


def made(kind: str, options: str) -> nn.Module:
    torch.manual_seed(0)
    make, shard = MODELS[kind]
    layer, whole = OPTIONS[options]
    return shard(make().train(), {**layer, "mesh": mesh()}, whole)


def batches(kind: str, rank: int, count: int) -> list[dict[str, Any]]:
    drawn: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(rank), "device": "cpu"}
    if "llama" in kind:
        ids = [torch.randint(64, (BATCH, LENGTH), **drawn) for _ in range(count)]
        return [{"input_ids": each, "labels": each} for each in ids]
    if "chain" in kind or "layers" in kind:
        return [{"input": torch.randn(BATCH * LENGTH, WIDTH, **drawn)} for _ in range(count)]
    return [{"value": torch.randn(BATCH, LENGTH, WIDTH, **drawn)} for _ in range(count)]


def loss(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.loss if hasattr(output, "loss") else output.float().square().mean()
    return found
