from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, Report
from rotor_solver import Option, Sequence
from rotor_solver.offload import Link, Moves
from tests.checkpointable.steps import planned_at

EVIL = "<script>[b]&'"


@pytest.fixture(scope="package")
def model() -> Checkpointable:
    """A plan of twelve stages that has to recompute; the name of one module has to be escaped."""
    torch.manual_seed(0)
    names = ["first", "second", EVIL, "fourth", "fifth", "last"]
    layers = OrderedDict((name, nn.Sequential(nn.Linear(64, 64), nn.Tanh())) for name in names)
    return planned_at(0.4, nn.Sequential(layers), torch.randn(256, 64), loss=lambda output: output.square().mean())


@pytest.fixture(scope="package")
def report(model: Checkpointable) -> Report:
    return model.report()


@pytest.fixture(scope="package")
def mixed(report: Report) -> Report:
    """The same chain with a stage of each kind: 0 in part, 1 packed, 2 in bf16, 3 elsewhere, 4 again, others whole."""

    def options(least: Option) -> tuple[Option, ...]:
        fewer = [replace(least, name=name) for name in ("in part", "in part, packed", "in bf16")]
        return (replace(least, saved=least.saved + 40_000), *fewer, replace(least, moved=40_000, name="elsewhere"))

    stages = tuple(replace(stage, options=options(stage.options[0])) for stage in report.chain)
    chain, rest = replace(report.chain, stages=stages), range(5, len(stages))
    sequence = Sequence.parse(
        f"Fe_0^1, Fe_1^2, Fe_2^3, Fe_3^4, CF_4, {', '.join(f'Fe_{k}' for k in rest)}, L, "
        f"{', '.join(f'B_{k}' for k in reversed(rest))}, Fe_4, B_4, B_3, B_2, B_1, B_0"
    )
    empty = Moves(((),) * len(sequence), ((),) * len(sequence))
    out, back = ([*each] for each in (empty.wait_out, empty.fetch))
    out[8], back[16] = (3,), (3,)
    moving = replace(sequence, moves=Moves(tuple(out), tuple(back)))
    budget = replace(report.budget, chain=chain, link=Link(1e9, 1e9), link_name="file:/tmp")
    return replace(report, budget=budget, sequence=moving, mem_limit=10**9)
