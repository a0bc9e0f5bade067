"""PyTorch's `activation_memory_budget`, a ratio, beside `rotor_py.memory_budget`, in bytes: peaks and times.

Every ratio is compiled and measured under `aot_eager`; then the same model within the bytes that the ratio took. Prints
the table of docs/benchmarks.md.

    python -m benchmarks.memory_budget [model ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import partitioners
from torch.nn import functional as F

from rotor_profiling.backends import memory_meter
from rotor_profiling.storage import storage_bytes
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.operator_costs import operator_costs
from rotor_py.compile.partitioner import BudgetPartitioner

RATIOS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
SHOWN = 10_000
"""Bytes: budgets are rounded up to what the table shows of them."""


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.model(value).float().pow(2).mean()


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens, use_cache=False).logits


class Block(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, width = value.shape
        heads = self.qkv(self.norms[0](value)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(batch, length, width)
        value = value + self.out(mixed)
        return value + self.inner(self.norms[1](value))


class Patches(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.cut(images).flatten(2).transpose(1, 2)).mean(1))


def chain() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
    return nn.Sequential(*layers), torch.randn(1024, 256)


def llama() -> tuple[nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return Logits(LlamaForCausalLM(config)), torch.randint(0, 512, (4, 128))


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(6):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(8, 3, 32, 32)


def patches() -> tuple[nn.Module, torch.Tensor]:
    return Patches(128, 2), torch.randn(8, 3, 64, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "MLP, 8 layers": chain,
    "Llama, 2 blocks": llama,
    "ConvNet, 6 layers": convolutions,
    "ViT, 2 blocks, dropout": patches,
}


@dataclass
class Measured:
    peak: int
    operators: float
    """Seconds of all operators of both graphs, each measured by itself: what no other process disturbs twice."""
    values: list[torch.Tensor]

    def equals(self, other: Measured) -> bool:
        return all(map(torch.equal, self.values, other.values))


def measured(made: Callable[[], tuple[nn.Module, torch.Tensor]], ratio: float, budget: int | None) -> Measured:
    """A step of a new model: within `budget` bytes, or by PyTorch's own `ratio`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    body, value = made()
    model = Loss(body)
    spent: list[float] = []
    own = None if budget is None else BudgetPartitioner(budget)  # as `memory_budget` gives it to aot_eager

    def partition(gm: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        if own is not None:
            graphs = own(gm, inputs, **settings)
            spent.append(next(reversed(own.chosen.values())).seconds)
            return graphs
        names = {node.name: node for node in gm.graph.nodes}
        costs = operator_costs(JointGraph(gm, settings["num_fwd_outputs"]))
        graphs = partitioners.min_cut_rematerialization_partition(gm, inputs, **settings)
        copies = [names.get(node.name) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        spent.append(sum(costs[node].seconds for node in copies if node in costs))
        return graphs

    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
    run = torch.compile(model, backend=backend)
    with torch._functorch.config.patch(activation_memory_budget=ratio):
        run(value).backward()
    model.zero_grad()
    torch.manual_seed(1)
    held = storage_bytes([*model.parameters(), *model.buffers(), value])
    meter = memory_meter(torch.device("cpu"))
    with meter:
        meter.mark("step")
        loss = run(value)
        loss.backward()
    values = [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
    return Measured(held + meter.phases["step"].peak, sum(spent), values)


def main() -> None:
    chosen = sys.argv[1:] or list(MODELS)
    print("| model | ratio | peak | operators | same | in these bytes: peak | operators | same |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in chosen:
        stored = measured(MODELS[name], 1.0, 10**15)

        def row(found: Measured, stored: Measured = stored) -> str:
            same = "yes" if found.equals(stored) else "**no**"
            times = f"×{found.operators / stored.operators:.3f}"
            return f"{found.peak / 1e6:.2f} MB | {times} | {same}"

        for ratio in RATIOS:
            theirs = measured(MODELS[name], ratio, None)
            try:
                ours = row(measured(MODELS[name], ratio, -(-theirs.peak // SHOWN) * SHOWN))
            except torch._dynamo.exc.BackendCompilerFailed as error:
                least = getattr(error.inner_exception, "min_bytes", None)
                if least is None:
                    raise
                ours = f"least: {least / 1e6:.2f} MB | |"
            print(f"| {name} | {ratio} | {row(theirs)} | {ours} |", flush=True)


if __name__ == "__main__":
    main()
