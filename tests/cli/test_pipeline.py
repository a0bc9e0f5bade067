"""rotor-plan --pipeline: cuts, a plan for every rank, and what equal cuts would cost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py import Checkpointable
from rotor_py.measure.pipeline_costs import PipelineCosts, pipeline_costs
from rotor_solver import Sequence, simulate
from tests.fields import ends

CHAIN = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
sample = torch.randn(512, 64)

def optimizer(parameters):
    return torch.optim.Adam(parameters)
"""


def report(plan, *arguments: object) -> dict:
    result = plan(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_report_has_the_cuts_every_rank_and_equal_cuts(plan, model_file):
    result = plan(model_file(CHAIN), "--pipeline", 4, "--mem-limit", "4MB", "--microbatches", 8)
    assert result.exit_code == 0, result.output
    for words in (
        "net.py fits on 4 ranks",
        "8 microbatches",
        "equal cuts",
        "in flight",
        "recomputed",
        "rank 3, from stage",
    ):
        assert words in result.stdout
    assert all(f"\n   {rank}  " in result.stdout for rank in range(4))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-whole"])
def test_every_rank_stays_inside_its_limit_and_every_stage_is_on_one(plan, model_file, schedule: str):
    found = report(plan, model_file(CHAIN), "--pipeline", 2, "--mem-limit", "9MB", "--schedule", schedule)
    pipeline = found["pipeline"]
    assert (pipeline["schedule"], pipeline["ranks"], pipeline["microbatches"]) == (schedule, 2, 4)
    parts = pipeline["parts"]
    assert [part["rank"] for part in parts] == [0, 1] * (2 if schedule == "interleaved" else 1)
    assert [parts[0]["first_stage"], parts[-1]["last_stage"]] == [0, 15]
    assert all(after["first_stage"] == before["last_stage"] + 1 for before, after in pairwise(parts))
    assert pipeline["cuts"] == [part["first_stage"] for part in parts[1:]]
    assert [len(part["names"]) for part in parts] == [part["last_stage"] - part["first_stage"] + 1 for part in parts]
    for rank in pipeline["by_rank"]:
        assert rank["peak_bytes"] <= rank["mem_limit"] == 9 * 10**6
    if found["equal_cuts"] is not None and schedule != "interleaved":
        assert pipeline["microbatch_seconds"] <= found["equal_cuts"]["microbatch_seconds"]


def test_with_little_memory_something_is_recomputed(plan, model_file):
    path = model_file(CHAIN)
    ample = report(plan, path, "--pipeline", 2, "--mem-limit", "1GB")["pipeline"]
    tight = report(plan, path, "--pipeline", 2, "--mem-limit", "3MB")["pipeline"]
    assert not any("CF_" in part["sequence"] for part in ample["parts"])
    assert any("CF_" in part["sequence"] for part in tight["parts"])


def test_every_rank_may_have_a_limit_of_its_own(plan, model_file):
    found = report(plan, model_file(CHAIN), "--pipeline", 2, "--mem-limit", "3MB,1GB")["pipeline"]
    assert [rank["mem_limit"] for rank in found["by_rank"]] == [3 * 10**6, 10**9]
    assert found["by_rank"][0]["peak_bytes"] <= 3 * 10**6


def test_no_plan_fits_and_the_least_limit_does(plan, model_file):
    path = model_file(CHAIN)
    result = plan(path, "--pipeline", 2, "--mem-limit", "300kB")
    ends(result, 3, "limit_too_small", mem_limit=300_000)
    least = result.output.rpartition("a limit of ")[2].strip().rstrip(".")
    assert plan(path, "--pipeline", 2, "--mem-limit", least).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "name"),
    [
        (["--pipeline", 2, "--schedule", "dual"], "unknown_value", "--pipeline"),
        (["--pipeline", 99, "--mem-limit", "1GB"], "too_few_stages", "--pipeline"),
        (["--pipeline", 2, "--mem-limit", "1GB,1GB,1GB"], "wrong_length", "--mem-limit"),
        (["--pipeline", 4, "--microbatches", 9, "--schedule", "interleaved"], "not_divisible", "--pipeline"),
        (["--pipeline", 2, "--virtual-stages", 2], "one_part_per_rank", "--pipeline"),
        (["--microbatches", 4], "needs_option", "--microbatches"),
        (["--schedule", "gpipe"], "needs_option", "--schedule"),
        (["--pipeline", 2, "--verify"], "excluded_together", "--verify"),
        (["--pipeline", 2, "--sweep"], "excluded_together", "--sweep"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(plan, model_file, arguments, kind: str, name: str):
    result = plan(model_file(CHAIN), *arguments)
    ends(result, 2, kind, name=name)


class Residual(nn.Module):
    """A skip connection from the first block past the second to the third, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
        self.blocks[5][0].requires_grad_(False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](value)
        third = self.blocks[2](self.blocks[1](first)) * first
        for block in self.blocks[3:]:
            third = block(third)
        return third


def costs_of(model: nn.Module, **more: object) -> tuple[Checkpointable, PipelineCosts]:
    network = Checkpointable(model, torch.randn(64, 32))
    costs = pipeline_costs(
        network.model, network.functions, network.inspection_values, network.device, microbatches=2, **more
    )
    return network, costs


def test_fixed_bytes_are_those_of_each_stage():
    linear, norm = nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32, affine=False)
    model = nn.Sequential(linear, norm, nn.Linear(32, 32, bias=False).requires_grad_(False))
    _, costs = costs_of(model)
    weight = 32 * 32 * 4
    assert costs.fixed[:2] == (2 * weight, 2 * 32 * 4 + 8)  # with its gradient; running statistics and a counter
    assert weight <= costs.fixed[2] <= weight + 200  # frozen; and scalars of two losses
    state = OptimizerCost(state_bytes=1000, step_bytes=500, present_bytes=0)
    _, stepped = costs_of(model, optimizer=state)
    assert [b - a for a, b in zip(costs.fixed, stepped.fixed, strict=True)] == [1000, 0, 0]
    assert stepped.stepping == (500, 0, 0)


def test_a_captured_model_is_not_cut_where_a_tensor_is_carried_past():
    network, costs = costs_of(Residual())
    assert network.captured
    carried = [each for each in network.inspection_values.carried if each.nbytes]
    assert set(costs.boundaries) == {
        point for point in range(1, len(network.names)) if not any(each.first <= point <= each.last for each in carried)
    }
    trained = sum(p.nbytes for p in network.parameters() if p.requires_grad)
    parameters = sum(p.nbytes for p in network.parameters())
    assert parameters + trained <= sum(costs.fixed) <= parameters + trained + 200


def test_what_runs_before_the_chain_belongs_to_the_first_stage():
    model = nn.Sequential(nn.Embedding(50, 32).requires_grad_(False), *[nn.Linear(32, 32) for _ in range(4)])
    network = Checkpointable(model, torch.randint(0, 50, (64,)))
    measured = network.inspection_values
    assert measured.prefix is not None
    costs = pipeline_costs(
        network.model, network.functions, measured, network.device, microbatches=3, batch_bytes=64 * 8
    )
    linear = (32 * 32 + 32) * 4
    assert costs.fixed[0] == 2 * linear + 50 * 32 * 4 + 3 * 64 * 8
    first = measured.chain(fresh_gradients=False).stages[0].options[0]
    assert costs.chain.stages[0].options[0].forward_time == first.forward_time + measured.prefix.seconds


def test_sequences_of_the_report_are_those_of_the_parts(plan, model_file):
    found = report(plan, model_file(CHAIN), "--pipeline", 2, "--mem-limit", "3MB")["pipeline"]
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    for part in found["parts"]:
        layers = [layer for block in model for layer in block][part["first_stage"] : part["last_stage"] + 1]
        network = Checkpointable(nn.Sequential(*layers), torch.randn(512, 64, requires_grad=True))
        simulate(network.budget.chain, Sequence.parse(part["sequence"]))  # ValueError if it were not valid
