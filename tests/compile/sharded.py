"""What every process does in the tests of `fully_shard` with compiled stages."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from rotor_py import Checkpointable
from rotor_py.compile import compiled_stage
from rotor_py.compile.stage_code import Compile, NotCompilableError
from rotor_solver import Sequence, store_all
from tests.distributed.fsdp_models import batches, loss, made
from tests.distributed.processes import here
from tests.distributed.steps import Numbers, adam, between, different, measured_peak_of, trained


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


def planned(kind: str, options: str, rank: int, compile: Compile) -> tuple[Checkpointable, Optimizer]:
    """A model all of whose stages run compiled that can be: which are faster so is a matter of times."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    model = made(kind, options)
    optimizer = adam(model)
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
    given, eager = batches(kind, rank, 3), made(kind, options)
    close = trained(eager, adam(eager), given, loss, seed=rank)
    stored, optimizer = planned(kind, options, rank, compile)
    assert stored.chain is not None
    expected = trained(by(stored, store_all(stored.chain)), optimizer, given, loss, seed=rank)
    found, optimizer = planned(kind, options, rank, compile)
    limit = between(found, share)
    sequence = found.compute_sequence(limit)
    numbers = trained(found, optimizer, given, loss, seed=rank)
    assert found.budget is not None
    predicted = found.budget.peak_bytes(sequence)
    measured = measured_peak_of(found, optimizer, given[:1], loss, predicted)
    assert found.sequence is sequence
    wrong = different(numbers, expected)
    return Found(str(sequence), found.compiled, found.names, wrong, far(numbers, close), limit, predicted, measured)


def far(numbers: Numbers, expected: Numbers) -> list[str]:
    """Of the first step: later ones go their own ways."""
    first = [name for name in expected if name.startswith(("loss 0", "gradient 0"))]
    return [name for name in first if not torch.allclose(numbers[name], expected[name], rtol=1e-3, atol=1e-5)]


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
