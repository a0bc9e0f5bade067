"""Predicted beside published memory: torchtitan's Llama 3.1 8B, FSDP2 over 8 and over 128 H100.

    python benchmarks/anchors_memory.py           # a minute on the CPU, without a network
    python benchmarks/anchors_memory.py --write   # also into docs/benchmarks.md and benchmarks/results/

https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, the rows
without torch.compile: 2 × 8192 on each device, bf16 with shards and reductions of 32 bits, selective checkpointing,
AdamW.
"Memory" there is what PyTorch has reserved at most. One process runs here, in a world that is not there (the "fake"
process group), on tensors without memory; its requests go through the simulated allocator.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time
from collections import defaultdict
from typing import Any

import torch
from anchors_works import LlamaBlock
from report import write
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rotor_py.estimation.caching_allocator import replay
from rotor_py.estimation.device_table import find_device
from rotor_py.estimation.simulated_step import FollowedStep, gathering_apart

aten = torch.ops.aten
PUBLISHED = {8: 82.4, 128: 67.0}
"""GiB, by the number of devices."""
_KEPT = {aten.mm.default, aten._scaled_dot_product_flash_attention.default}


class Selective(nn.Module):
    """A block whose attention and every second matrix product are kept: torchtitan's `selective_ac_option = "op"`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            self.block, value, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts
        )
        return result

    @staticmethod
    def contexts() -> Any:
        products: dict[bool, int] = defaultdict(int)

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if func is aten.mm.default:
                products[context.is_recompute] += 1
            even = func is aten.mm.default and products[context.is_recompute] % 2 == 0
            return CheckpointPolicy.MUST_SAVE if func in _KEPT and not even else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    def __init__(self, layers: int, vocabulary: int = 128_256, width: int = 4096) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Selective(LlamaBlock()) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.words(tokens)
        for layer in self.layers:
            value = layer(value)
        result: torch.Tensor = self.head(self.norm(value))
        return result


def predicted(world: int, layers: int = 32, length: int = 8192) -> dict[str, Any]:
    """Two steps of one process of `world`."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    logging.disable(logging.WARNING)
    began = time.perf_counter()
    device = find_device("h100")
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Llama(layers)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        tokens = torch.zeros(2, length, dtype=torch.long)
        step = FollowedStep([*model.parameters(), tokens], device)
        with gathering_apart(step), step:
            for _ in range(2):
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()
    peak = replay(step.events)
    return {
        "world": world,
        "published_gib": PUBLISHED.get(world),
        "allocated_gib": peak.allocated_bytes / 2**30,
        "reserved_gib": peak.reserved_bytes / 2**30,
        "reserved_expandable_gib": replay(step.events, expandable=True).reserved_bytes / 2**30,
        "took_seconds": time.perf_counter() - began,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| devices | published, GiB reserved | predicted | predicted / published | expandable segments | allocated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['world']} | {row['published_gib']} | {row['reserved_gib']:.1f} "
        f"| {row['reserved_gib'] / row['published_gib']:.2f} | {row['reserved_expandable_gib']:.1f} "
        f"| {row['allocated_gib']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    # A process for each world: DTensor keeps what it has learnt of a mesh.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.map(predicted, PUBLISHED, chunksize=1)
    print(table(rows), *(f"{row['took_seconds']:.0f} s" for row in rows), sep="\n")
    if options.write:
        write("anchors-memory", table(rows), rows, torch.device("cpu"), how="Computed")


if __name__ == "__main__":
    main()
