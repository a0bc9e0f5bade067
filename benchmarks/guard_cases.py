"""The cases of `guard.py`: models of the README, steps of other kinds, and random chains (`guard_chains.py`)."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ecosystem import bert, convnext, gpt2, llama, mixtral, resnet, swin, t5, unet, vit, whisper
from guard_chains import Record, record_chain, record_long_chains, record_revolve
from guard_record import Trained, digest, fixed_clocks, fixed_times, record_model
from torch import nn

from rotor_py import Checkpointable, CheckpointOptim, models
from rotor_solver import Sequence

ROOT = Path(__file__).resolve().parent.parent


# Models of the README, small


def network(make: Callable[..., nn.Module], batch: int, image: int, **options: Any) -> Trained:
    model = make(**options)
    inputs, labels = torch.randn(batch, 3, image, image), torch.randint(10, (batch,))
    return Trained(model, (inputs,), lambda output: nn.functional.cross_entropy(output, labels))


def vgg(batch: int, image: int) -> Trained:
    """VGG-16 with thin linear layers: nearly all of its parameters are in these."""
    case = network(models.vgg16_bn, batch, image)
    for name, module in case.model.named_modules():
        for child, layer in module.named_children():
            if isinstance(layer, nn.Linear) and layer.weight.numel() > 10**6:
                wide = layer.in_features if "0" in (name, child) and layer.in_features > 4096 else 64
                setattr(module, child, nn.Linear(wide, 64 if layer.out_features == 4096 else layer.out_features))
    return case


def from_case(make: Callable[..., Any], **options: Any) -> Trained:
    model, inputs, loss = make(**options)
    return Trained(model, inputs, loss)


README: dict[str, tuple[Callable[[], Trained], Callable[[], Trained]]] = {
    "ResNet-18": (lambda: network(models.resnet18, 2, 32), lambda: network(models.resnet18, 8, 96)),
    "ResNet-50": (lambda: network(models.resnet50, 2, 32), lambda: network(models.resnet50, 4, 64)),
    "VGG-16": (lambda: vgg(2, 32), lambda: vgg(4, 64)),
    "DenseNet-121": (lambda: network(models.densenet121, 2, 32), lambda: network(models.densenet121, 4, 48)),
    "Inception v3": (
        lambda: network(models.inception_v3, 2, 80, aux_logits=False),
        lambda: network(models.inception_v3, 4, 96, aux_logits=False),
    ),
    "Llama": (lambda: from_case(llama, batch=2, length=32, layers=3), lambda: from_case(llama)),
    "GPT-2": (lambda: from_case(gpt2, batch=2, length=64, layers=2), lambda: from_case(gpt2)),
    "BERT": (lambda: from_case(bert, batch=1, layers=3), lambda: from_case(bert)),
    "T5": (lambda: from_case(t5, batch=1, layers=2), lambda: from_case(t5, batch=2)),
    "ViT": (lambda: from_case(vit, batch=2, layers=3), lambda: from_case(vit)),
    "Swin": (lambda: from_case(swin, batch=1), lambda: from_case(swin)),
    "ConvNeXt": (lambda: from_case(convnext, batch=2), lambda: from_case(convnext)),
    "ResNet": (lambda: from_case(resnet, batch=2), lambda: from_case(resnet)),
    "Mixtral": (lambda: from_case(mixtral, batch=1, layers=3), lambda: from_case(mixtral)),
    "Whisper": (lambda: from_case(whisper, batch=1, layers=3), lambda: from_case(whisper)),
    "U-Net": (lambda: from_case(unet, batch=1), lambda: from_case(unet)),
}
"""The networks and models of the README: how they are made small, and in the whole guard."""


# Steps of other kinds


class Block(nn.Module):
    """Residual, with what a step has to restore: dropout, and statistics that move."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.narrow(self.dropout(nn.functional.gelu(self.wide(self.norm(value)))))


class Counting(nn.Module):
    """Its output depends on a buffer that every forward changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.mean += 0.1 * (value.detach().mean(0) - self.mean)
        return value * torch.sigmoid(value - self.mean)


def chain_model(width: int = 64, blocks: int = 5, batch: int = 96) -> Trained:
    """A chain of layers, of which one works in place, with dropout, BatchNorm, a moving buffer and a frozen layer."""
    layers: list[nn.Module] = [nn.Linear(32, width), nn.ReLU(inplace=True)]
    layers += [Block(width) for _ in range(blocks)]
    layers.insert(4, Counting(width))
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    layers[2].wide.weight.requires_grad_(False)
    labels = torch.randint(10, (batch,))
    return Trained(model, (torch.randn(batch, 32),), lambda output: nn.functional.cross_entropy(output, labels))


class Residual(nn.Module):
    """No chain: it is captured. The first and the last layer may share their weight, as embeddings do."""

    def __init__(self, width: int, blocks: int, shared: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.exit = nn.Linear(width, width)
        if shared:
            self.exit.weight = self.entry.weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = first = self.entry(value)
        for block in self.blocks:
            value = block(value)
        return self.exit(value + first)


def captured_model(width: int = 64, blocks: int = 4, batch: int = 96, shared: bool = True) -> Trained:
    return Trained(Residual(width, blocks, shared), (torch.randn(batch, width),), lambda output: output.square().mean())


def in_autocast(make: Callable[[], Trained]) -> Trained:
    return replace(make(), autocast=True)


def in_flight(make: Callable[[], Trained]) -> Trained:
    return replace(make(), forwards=2)


@contextmanager
def one_process() -> Iterator[None]:
    """A group of this process alone, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def record_ddp(make: Callable[[], Trained]) -> Record:
    from torch.nn.parallel import DistributedDataParallel

    with one_process():
        return record_model(make, wrap=lambda model: DistributedDataParallel(model, bucket_cap_mb=0.05))


def record_fsdp(make: Callable[[], Trained]) -> Record:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_process():
        mesh = init_device_mesh("cpu", (1,))

        def sharded(model: nn.Module) -> nn.Module:
            for block in [each for each in model.modules() if isinstance(each, Block)]:
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        return record_model(make, wrap=sharded)


def plan_with_fixed_chain(planned: Checkpointable, name: str, limit: int) -> None:
    """Have a plan with its own program found for the chain with fixed times: moves, and backwards in reverse."""
    budget = planned.budget
    assert budget is not None
    planned.divide(replace(budget, chain=fixed_times(budget.chain)))
    planned.compute_sequence(limit)


def record_offload(make: Callable[[], Trained]) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        return record_model(make, {"offload": f"file:{folder}"}, plan=plan_with_fixed_chain)


def record_functions() -> Record:
    """`CheckpointOptim.apply` on plain functions."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)]
    value = torch.randn(8, 16, requires_grad=True)
    found = {}
    for text in (
        "Fe_0, Fe_1, Fe_2, Fe_3, L, B_3, B_2, B_1, B_0",
        "CF_0, Fn_1, CF_2, Fe_3, L, B_3, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0",
    ):
        for layer in layers:
            layer.zero_grad()
        value.grad = None
        torch.manual_seed(1)
        output = CheckpointOptim.apply(layers, Sequence.parse(text), list("abcd"), True, value)
        output.square().sum().backward()
        gradients = [p.grad for layer in layers for p in layer.parameters()]
        found[text] = digest([output, value.grad, *gradients, torch.get_rng_state()])
    return found


CHAINS, FEW_CHAINS, AT_ONCE = 200, 60, 10


def cases(small: bool = False) -> dict[str, Callable[[], Record]]:
    """All cases by name; the `small` ones are the first of them."""
    found: dict[str, Callable[[], Record]] = {
        name: (lambda make=make: record_model(make)) for name, (make, _) in README.items()
    }
    found["chain"] = lambda: record_model(chain_model)
    found["captured"] = lambda: record_model(captured_model)
    found["autocast"] = lambda: record_model(lambda: in_autocast(chain_model))
    # Under autocast, the gradient of a weight that stages share is summed in another order when one runs again.
    found["autocast, captured"] = lambda: record_model(lambda: in_autocast(lambda: captured_model(shared=False)))
    found["DDP"] = lambda: record_ddp(chain_model)
    found["FSDP2"] = lambda: record_fsdp(chain_model)
    found["offload"] = lambda: record_offload(captured_model)
    found["two in flight"] = lambda: record_model(
        lambda: in_flight(captured_model), {"forwards_in_flight": 2, "backward_order": "any"}
    )
    found["two in flight, in reverse"] = lambda: record_model(
        lambda: in_flight(chain_model),
        {"forwards_in_flight": 2, "backward_order": "reverse"},
        plan=plan_with_fixed_chain,
    )
    found["functions"] = record_functions
    found["revolve"] = record_revolve
    found["long chains"] = record_long_chains
    for first in range(0, CHAINS, AT_ONCE):
        if first == FEW_CHAINS:
            if small:
                return found
            found |= {f"{name}, larger": (lambda make=make: record_model(make)) for name, (_, make) in README.items()}
        found[f"chains {first} to {first + AT_ONCE - 1}"] = lambda first=first: {
            f"chain {seed}": record_chain(seed) for seed in range(first, first + AT_ONCE)
        }
    return found


def run_case(name: str) -> Record:
    """The record of one case, in a process of its own."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    with fixed_clocks(), redirect_stderr(io.StringIO()):
        return cases()[name]()
