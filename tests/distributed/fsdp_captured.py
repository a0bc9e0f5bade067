"""What every process does in the tests of `fully_shard` of models that are no chain."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rotor_profiling import measured_peak, tensors_in
from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.distributed.processes import device, random_state

BATCH, LENGTH, WIDTH = 8, 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        made = self.narrow(nn.functional.gelu(self.wide(self.norm(value))) * scale)
        return value + nn.functional.dropout(made, 0.1, self.training)


class Skips(nn.Module):
    """Blocks, the first of which are connected to the last over all in between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4 * WIDTH))

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


def llama() -> nn.Module:
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
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "skips": Skips}


def made(kind: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    options, whole = OPTIONS[name]
    model = MODELS[kind]().train()
    for layer in model.blocks if kind == "skips" else model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **{**options, **whole})


def batches(kind: str, rank: int, count: int) -> list[dict[str, Any]]:
    generator = torch.Generator(device()).manual_seed(rank)
    if kind == "skips":
        return [{"value": torch.randn(BATCH, LENGTH, WIDTH, generator=generator)} for _ in range(count)]
    ids = [torch.randint(64, (BATCH, LENGTH), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def loss(output: Any) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output.float().square().mean()


def mixed(**options: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **options)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "kept": ({"reshard_after_forward": False}, {}),
    "mixed": ({"mp_policy": mixed()}, {}),
    "mixed, full out": ({"mp_policy": mixed()}, {"mp_policy": mixed(output_dtype=torch.float32)}),
}
"""For every layer, and what is different for the whole model."""


def trained(kind: str, rank: int, model: nn.Module, accumulated: int = 1) -> dict[str, torch.Tensor]:
    """All numbers of three steps of Adam."""
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters())
    numbers = {}
    given = batches(kind, rank, 3 * accumulated)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(accumulated):
            model.set_requires_gradient_sync(number == accumulated - 1)
            value = loss(model(**given[step * accumulated + number]))
            value.backward()
            numbers[f"loss {step} {number}"] = value.detach()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            numbers[f"gradient {step} {name}"] = parameter.grad.to_local().clone()
        optimizer.step()
    numbers |= {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    numbers["random"] = random_state()
    return numbers


def halfway(planned: Checkpointable, batch: dict[str, Any]) -> int:
    planned.measure(batch)
    assert planned.budget is not None
    planned.compute_sequence("1GB")
    planned._agree()
    return (planned.budget.least_bytes() + planned.budget.peak_bytes(store_all(planned.budget.chain))) // 2


def same_as_plain(rank: int, kind: str, options: str, accumulated: int = 1) -> tuple[str, list[str], int, int, int]:
    """The sequence, the names of numbers that differ; limit, prediction and measured peak of one more step."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    expected = trained(kind, rank, made(kind, options), accumulated)
    model = made(kind, options)
    planned = Checkpointable(model, loss=loss)
    batch = batches(kind, rank, 1)[0]
    limit = halfway(planned, batch)
    dist.barrier()
    planned.compute_sequence(limit)
    found = trained(kind, rank, planned, accumulated)
    different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    present = [*(p.to_local() for p in model.parameters()), *(p.grad.to_local() for p in model.parameters())]
    measured = measured_peak(
        lambda: loss(planned(**batch)).backward(), tensors_in([present, list(model.buffers()), batch]), device()
    )
    assert planned.sequence is not None
    assert planned.budget is not None
    measured += planned.budget.fixed.optimizer  # it is gone
    return str(planned.sequence), different, limit, planned.budget.peak_bytes(planned.sequence), measured
