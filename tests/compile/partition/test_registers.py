"""What fused code takes is known before it is compiled: values that stay in registers take nothing."""

from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.utils import fresh_cache

from rotor_py.compile.candidates import by_torch
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.partition import GraphCosts, Run, in_registers
from rotor_py.compile.partitioner import BudgetPartitioner
from tests.compile.partition.compiled_steps import Block, Loss, noted_usual, take_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.slow
def test_the_estimated_peak_is_near_that_of_fused_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted_usual(monkeypatch)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Loss(Block(64))
    chooser = BudgetPartitioner("1GB", fused=True, estimated=True)
    with fresh_cache():
        run = torch.compile(model, options={"custom_partitioner_fn": chooser})
        step = take_step(model, run, torch.randn(4, 128, 64))
    (weight,) = chooser.chosen.values()
    assert 0.9 * step.peak < weight.peak < 1.08 * step.peak
    ((joint, _),) = seen
    (bound,) = by_torch(joint, GraphCosts.of(joint, fused=True), [1])
    assert weight.peak < bound.weight.peak


def names_in_registers(function: Any) -> list[str]:
    """The operators of `function` of a square whose values stay in registers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(function, tracing_mode="fake")(torch.randn(8, 8))
    steps: dict[fx.Node, Run] = {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            steps[node] = Run(node, {each: steps.get(each, each) for each in node.all_input_nodes})
    ends = {steps[each] for each in module.graph.output_node().all_input_nodes}
    runs = list(steps.values())
    inside = in_registers(JointGraph(module, 1), runs, ends)
    return [str(run.node) for run in runs if run in inside]


def read_on_both_sides(x: torch.Tensor) -> torch.Tensor:
    read_twice = torch.exp(x)
    return (torch.tanh(read_twice) @ x).sin() + read_twice


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: torch.tanh(torch.exp(x)).sin(), ["exp", "tanh"]),
        (lambda x: torch.exp(x).view(64).sin(), ["exp", "view"]),
        (lambda x: torch.exp(x) @ x, []),
        (lambda x: torch.exp(x).view(4, 16) @ x.view(16, 4), []),
        (read_on_both_sides, ["sin"]),
        (lambda x: (torch.exp(x).sum(1) * 2).sin(), ["exp", "mul"]),
    ],
)
def test_a_value_stays_in_registers_if_one_kernel_makes_and_reads_it(function: Any, names: list[str]) -> None:
    assert names_in_registers(function) == names
