"""What every process does in the tests of `fully_shard` of models that are no chain."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from rotor_profiling import measured_peak, tensors_in
from rotor_profiling.storage import local
from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.distributed.processes import device, random_state

Numbers = dict[str, torch.Tensor]

BATCH, LENGTH, WIDTH = 8, 64, 32


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        made = self.narrow(nn.functional.gelu(self.wide(self.norm(value))) * scale)
        return value + nn.functional.dropout(made, 0.1, self.training)


class Skips(nn.Module):
    """Blocks, the first of which are connected to the last over all in between."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4 * width))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.enter(value)
        kept = []
        for block in self.blocks[:1]:
            value = block(value, scale=self.scale)
            kept.append(value)
        for block in self.blocks[1:-1]:
            value = block(value, scale=self.scale)
        for block in self.blocks[-1:]:
            value = block(value + kept.pop(), scale=self.scale)
        return self.head(value)


class Twice(nn.Module):
    """One block is used twice, and a layer has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value, scale = self.first(value), value.new_ones(4 * WIDTH)
        for number in (0, 1, 2, 1):
            value = self.blocks[number](value, scale=scale)
        return self.head(value)


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=2,
        attn_implementation="eager",
        attention_dropout=0.1,
        use_cache=False,
        **options,
    )
    return LlamaForCausalLM(config)


def sharded_alone(model: Any, layer: dict[str, Any], whole: dict[str, Any]) -> nn.Module:
    """Each layer by itself, and what is left with the model: as most people do it."""
    for each in getattr(model, "blocks", None) or model.model.layers:
        fully_shard(each, **layer)
    return fully_shard(model, **{**layer, **whole})


def sharded_together(model: Any, layer: dict[str, Any], whole: dict[str, Any]) -> nn.Module:
    """As torchtitan does it: the embedding alone, the last norm together with the head."""
    fully_shard(model.model.embed_tokens, **layer)
    fully_shard([model.model.norm, model.lm_head], **{**layer, "reshard_after_forward": False})
    return sharded_alone(model, layer, whole)


def sharded_in_parts(model: Any, layer: dict[str, Any], whole: dict[str, Any]) -> nn.Module:
    """Groups inside of groups, and none for the whole model."""
    for each in model.blocks:
        fully_shard(each.wide, **layer)
        fully_shard(each, **layer)
    fully_shard(model.head, **layer)
    fully_shard(model.enter, **layer)
    return model


def adapted() -> nn.Module:
    """Nothing is trained but a few small layers."""
    model = Skips().requires_grad_(False)
    for block in model.blocks[2:]:
        block.norm.requires_grad_(True)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., nn.Module]]] = {
    "llama": (llama, sharded_alone),
    "tied llama": (partial(llama, tie_word_embeddings=True), sharded_alone),
    "grouped llama": (llama, sharded_together),
    "skips": (Skips, sharded_alone),
    "skips in parts": (Skips, sharded_in_parts),
    "heavy skips": (partial(Skips, 8 * WIDTH), sharded_alone),
    "adapted": (adapted, sharded_alone),
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


def made(kind: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    make, shard = MODELS[kind]
    return shard(make().train(), *OPTIONS[name])


def batches(kind: str, rank: int, count: int) -> list[dict[str, Any]]:
    generator = torch.Generator(device()).manual_seed(rank)
    if "llama" not in kind:
        size = 1 if "heavy" in kind else BATCH
        return [{"value": torch.randn(size, LENGTH, WIDTH, generator=generator)} for _ in range(count)]
    ids = [torch.randint(64, (BATCH, LENGTH), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def loss(output: Any) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output.float().square().mean()


def trained(kind: str, rank: int, model: nn.Module, optimizer: Optimizer, accumulated: int = 1) -> Numbers:
    """All numbers of three steps."""
    torch.manual_seed(rank)
    numbers: Numbers = {}
    given = batches(kind, rank, 3 * accumulated)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(accumulated):
            set_sync(model, number == accumulated - 1)
            value = loss(model(**given[step * accumulated + number]))
            value.backward()
            numbers[f"loss {step} {number}"] = value.detach()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter.grad, DTensor), name
                numbers[f"gradient {step} {name}"] = parameter.grad.to_local().clone()
        optimizer.step()
    numbers |= {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    numbers["random"] = random_state()
    return numbers


def set_sync(model: nn.Module, on: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(on)


def same_as_plain(
    rank: int, kind: str, options: str, accumulated: int = 1, share: float = 0.5
) -> tuple[str, list[str], int, int, int]:
    """The sequence, the names of numbers that differ; limit, prediction and measured peak of a step with a plan.

    The limit is so much of the way from the least possible to storing everything.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model = made(kind, options)
    expected = trained(kind, rank, model, Adam(model.parameters()), accumulated)
    model = made(kind, options)
    optimizer = Adam(model.parameters())
    set_sync(model, accumulated == 1)
    planned = Checkpointable(model, batches(kind, rank, 1)[0], loss=loss, optimizer=optimizer)
    assert planned.budget is not None
    least, most = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    limit = least + int(share * (most - least))
    sequence = planned.compute_sequence(limit)
    found = trained(kind, rank, planned, optimizer, accumulated)
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    measured = min(measured_peak_of(kind, rank, planned, optimizer, accumulated) for _ in range(3))
    assert planned.sequence == sequence
    return str(sequence), different, limit, planned.budget.peak_bytes(sequence), measured


def measured_peak_of(
    kind: str, rank: int, planned: Checkpointable, optimizer: Optimizer, accumulated: int
) -> int:
    """The peak of a step, or more: what a thread of the backend is the last to let go of is not seen to be freed."""
    batch = batches(kind, rank, 1)[0]
    state = [[each for each in entry.values()] for entry in optimizer.state.values()]
    parameters = list(planned.parameters())
    sharded = [*tensors_in(state), *parameters, *(p.grad for p in parameters if p.grad is not None)]

    def step() -> None:
        for number in range(accumulated):
            set_sync(planned, number == accumulated - 1)
            loss(planned(**batch)).backward()

    present = [*map(local, sharded), *planned.buffers(), *tensors_in(batch)]
    return measured_peak(step, present, device())
