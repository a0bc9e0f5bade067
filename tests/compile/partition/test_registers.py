"""What fused code takes is known before it is compiled: values that stay in registers take nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import fresh_cache

from rotor_py.compile.candidates import by_torch
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.partition import Run
from rotor_py.compile.partitioner import BudgetPartitioner
from rotor_py.compile.peak import GraphCosts, in_registers
from tests.compile.partition.compiled_steps import Block, Loss, noted_usual, take_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def block_of_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Tanh())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "linears"])
def test_the_estimated_peak_is_near_that_of_fused_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted_usual(monkeypatch)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Loss(nn.Sequential(*(Block(64) if name == "llama" else block_of_linears() for _ in range(3))))
    chooser = BudgetPartitioner("1GB", fused=True, estimated=True)
    with fresh_cache():
        run = torch.compile(model, options={"custom_partitioner_fn": chooser})
        step = take_step(model, run, torch.randn(4, 128, 64))
    (weight,) = chooser.chosen.values()
    assert 0.9 * step.peak < weight.peak < 1.08 * step.peak
    ((joint, _),) = seen
    (bound,) = by_torch(joint, GraphCosts.of(joint, fused=True), [1])
    assert weight.peak < bound.weight.peak


def forward_runs(function: Any, *inputs: torch.Tensor) -> tuple[JointGraph, list[Run], set[Run]]:
    """The graph of `function`, its operators in order, and those of its result."""
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(function, tracing_mode="fake")(*inputs)
    joint = JointGraph(module, 1)
    steps: dict[fx.Node, Run] = {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            steps[node] = Run(node, {each: steps.get(each, each) for each in node.all_input_nodes})
    (output,) = module.graph.find_nodes(op="output")
    return joint, list(steps.values()), {steps[each] for each in output.all_input_nodes}


def names_in_registers(function: Any, *inputs: torch.Tensor) -> list[str]:
    joint, runs, ends = forward_runs(function, *inputs)
    return [str(run.node) for run in runs if run in in_registers(joint, runs, ends)]


SQUARE = torch.randn(8, 8)


def test_what_one_kernel_makes_and_reads_stays_in_registers() -> None:
    assert names_in_registers(lambda x: torch.tanh(torch.exp(x)).sin(), SQUARE) == ["exp", "tanh"]


def test_a_view_of_it_does_too() -> None:
    assert names_in_registers(lambda x: torch.exp(x).view(64).sin(), SQUARE) == ["exp", "view"]


def test_what_a_product_reads_or_the_caller_does_not() -> None:
    assert names_in_registers(lambda x: torch.exp(x) @ x, SQUARE) == []
    assert names_in_registers(lambda x: torch.exp(x).view(4, 16) @ x.view(16, 4), SQUARE) == []


def test_what_is_read_on_both_sides_of_a_product_does_not() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        read_twice = torch.exp(x)
        return (torch.tanh(read_twice) @ x).sin() + read_twice

    assert names_in_registers(function, SQUARE) == ["sin"]


def test_sums_do_not() -> None:
    assert names_in_registers(lambda x: (torch.exp(x).sum(1) * 2).sin(), SQUARE) == ["exp", "mul"]
