"""What every process does in the tests of `fully_shard` with compiled stages."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Adam

from rotor_profiling.storage import local
from rotor_py import Checkpointable
from rotor_py.compile import compiled_stage
from rotor_py.compile.stage_code import Compile, NotCompilableError
from rotor_solver import Sequence, recompute_all, store_all
from tests.distributed.fsdp_captured import Numbers, measured_peak_of, trained
from tests.distributed.fsdp_models import batches, loss, made
from tests.distributed.processes import here


class Found(NamedTuple):
    sequence: str
    compiled: list[str]
    names: list[str]
    different: list[str]
    """Numbers that are not those of the compiled step that stores everything."""
    far: list[str]
    """Numbers that are not close to those of eager mode."""
    limit: int
    predicted: int
    measured: int


def planned(kind: str, options: str, rank: int, compile: Compile) -> tuple[Checkpointable, Adam]:
    """A model all of whose stages run compiled that can be: which are faster so is a matter of times."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model = made(kind, options)
    optimizer = Adam(model.parameters())
    found = Checkpointable(
        model, here(batches(kind, rank, 1)[0]), loss=loss, optimizer=optimizer, compile=compile, watch=False
    )
    plan = found._planner.in_use
    plan.turn_to(plan.ways[-2])
    plan.ways = (plan.ways[-2],)
    return found, optimizer


def by(found: Checkpointable, sequence: Sequence) -> Checkpointable:
    """Follow a sequence that is the same in all processes."""
    found.sequence = found._planner.in_use.agreed = sequence
    return found


def same_as_stored(rank: int, kind: str, options: str, share: float, compile: Compile) -> Found:
    """Three steps inside a limit so much of the way from the least to storing all, beside steps that store all."""
    eager = made(kind, options)
    close = trained(kind, rank, eager, Adam(eager.parameters()))
    stored, optimizer = planned(kind, options, rank, compile)
    assert stored.chain is not None
    expected = trained(kind, rank, by(stored, store_all(stored.chain)), optimizer)
    found, optimizer = planned(kind, options, rank, compile)
    assert found.budget is not None
    least, most = found.budget.least_bytes(), found.budget.peak_bytes(store_all(found.budget.chain))
    limit = least + int(share * (most - least))
    sequence = found.compute_sequence(limit)
    numbers = trained(kind, rank, found, optimizer)
    predicted = found.budget.peak_bytes(sequence)
    measured = measured_peak_of(kind, rank, found, optimizer, 1, predicted)
    assert found.sequence is sequence
    return Found(
        str(sequence),
        found.compiled,
        found.names,
        [name for name, value in expected.items() if not torch.equal(value, numbers[name])],
        far(numbers, close),
        limit,
        predicted,
        measured,
    )


def far(numbers: Numbers, expected: Numbers) -> list[str]:
    """Of the first step: later ones go their own ways."""
    first = [name for name in expected if name.startswith(("loss 0", "gradient 0"))]
    return [name for name in first if not torch.allclose(numbers[name], expected[name], rtol=1e-3, atol=1e-5)]


def smaller_batch(rank: int) -> tuple[list[str], int]:
    """What differs between a step that stores all and one that computes all again; how many kinds are new to both."""
    found, _ = planned("skips in parts", "plain", rank, True)
    chain, value = found.chain, here(batches("skips in parts", rank, 1)[0])["value"][:3]
    assert chain is not None
    compile_code, compiled = compiled_stage.compile_code, []
    steps = []
    try:
        compiled_stage.compile_code = lambda stage, *rest: compiled.append(stage) or compile_code(stage, *rest)
        for sequence in (recompute_all(chain), store_all(chain)):
            torch.manual_seed(rank)
            found.zero_grad()
            loss(by(found, sequence)(value=value)).backward()
            steps.append({name: local(p.grad).clone() for name, p in found.named_parameters() if p.grad is not None})
    finally:
        compiled_stage.compile_code = compile_code
    return [name for name, made in steps[0].items() if not torch.equal(made, steps[1][name])], len(compiled)


def failing_in_one(rank: int) -> tuple[list[str], list[str]]:
    """The stages that are compiled, and all of them, where one process can compile no more than its first kinds."""
    compile_code, compiled = compiled_stage.compile_code, []

    def failing(stage: nn.Module, *rest: Any) -> Any:
        compiled.append(stage)
        if rank == 0 and len(compiled) > 2:
            raise NotCompilableError("this machine has no compiler")
        return compile_code(stage, *rest)

    try:
        compiled_stage.compile_code = failing
        found, _ = planned("skips in parts", "plain", rank, True)
    finally:
        compiled_stage.compile_code = compile_code
    loss(found(**here(batches("skips in parts", rank, 1)[0]))).backward()
    return found.compiled, found.names
