"""rotor-plan --pipeline: cuts, a plan for every rank, and what equal cuts would cost."""

import json

import torch
from torch import nn

from rotor_profiling import OptimizerCost
from rotor_py import Checkpointable
from rotor_py.measure.pipeline_costs import PipelineCosts, pipeline_costs
from rotor_solver import Sequence, simulate
from tests.distributed.fsdp_models import Skips
from tests.fields import ends

CHAIN = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
sample = torch.randn(512, 64)

def optimizer(parameters):
    return torch.optim.Adam(parameters)
"""


def test_the_report_has_the_cuts_every_rank_inside_its_limit_and_equal_cuts(plan, model_file, tmp_path):
    options = ("--pipeline", 2, "--mem-limit", "9MB", "--schedule", "zero-bubble", "--json", tmp_path / "found.json")
    result = plan(model_file(CHAIN), *options)
    assert result.exit_code == 0, result.output
    expected = ("net.py fits on 2 ranks", "4 microbatches", "equal cuts", "in flight", "recomputed", "rank 1, from")
    for words in (*expected, *(f"\n   {rank}  " for rank in range(2))):
        assert words in result.stdout
    whole = json.loads((tmp_path / "found.json").read_text())
    found, parts = whole["pipeline"], whole["pipeline"]["parts"]
    assert (found["schedule"], found["ranks"], found["microbatches"]) == ("zero-bubble", 2, 4)
    assert [part["rank"] for part in parts] == [0, 1]
    assert [parts[0]["first_stage"], parts[1]["last_stage"]] == [0, 15]
    assert found["cuts"] == [parts[1]["first_stage"]] == [parts[0]["last_stage"] + 1]
    assert [len(part["names"]) for part in parts] == [part["last_stage"] - part["first_stage"] + 1 for part in parts]
    for rank in found["by_rank"]:
        assert rank["peak_bytes"] <= rank["mem_limit"] == 9 * 10**6
    assert found["microbatch_seconds"] <= whole["equal_cuts"]["microbatch_seconds"]


def test_the_least_limit_is_said_and_plans_recompute_by_sequences_of_each_part(plan, report, model_file):
    pipeline = (model_file(CHAIN), "--pipeline", 2, "--mem-limit")
    refused = plan(*pipeline, "300kB")
    ends(refused, 3, "limit_too_small", mem_limit=300_000)
    least = refused.__dict__["failure"].numbers["min_bytes"]
    assert f"a limit of {least} bytes" in refused.output
    tight, ample = (report(*pipeline, limits)["pipeline"] for limits in (least, "9MB,1GB"))
    assert [rank["mem_limit"] for rank in ample["by_rank"]] == [9 * 10**6, 10**9]
    assert not any("CF_" in part["sequence"] for part in ample["parts"])
    assert any("CF_" in part["sequence"] for part in tight["parts"])
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())]
    for part in tight["parts"]:
        own = layers[part["first_stage"] : part["last_stage"] + 1]
        network = Checkpointable(nn.Sequential(*own), torch.randn(512, 64, requires_grad=True))
        simulate(network.budget.chain, Sequence.parse(part["sequence"]))  # ValueError if it were not valid
    ends(plan(model_file(CHAIN), "--pipeline", 99, "--mem-limit", "1GB"), 2, "too_few_stages", name="--pipeline")


def costs_of(model: nn.Module, sample: object = None, **more: object) -> tuple[Checkpointable, PipelineCosts]:
    network = Checkpointable(model, torch.randn(64, 32) if sample is None else sample)
    measured = network.inspection_values
    return network, pipeline_costs(network.model, network.functions, measured, network.device, microbatches=3, **more)


def test_fixed_bytes_are_those_of_each_stage_and_what_runs_before_the_chain_belongs_to_the_first():
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
    model = nn.Sequential(nn.Embedding(50, 32).requires_grad_(False), *[nn.Linear(32, 32) for _ in range(4)])
    network, costs = costs_of(model, torch.randint(0, 50, (64,)), batch_bytes=64 * 8)
    assert costs.fixed[0] == 2 * (32 * 32 + 32) * 4 + 50 * 32 * 4 + 3 * 64 * 8
    first = network.inspection_values.chain(fresh_gradients=False).stages[0].options[0]
    before = network.inspection_values.prefix.seconds
    assert costs.chain.stages[0].options[0].forward_time == first.forward_time + before


def test_a_captured_model_is_not_cut_where_a_tensor_is_carried_past():
    model = Skips()  # one of which is carried past blocks
    model.head.requires_grad_(False)
    network, costs = costs_of(model)
    assert network.captured
    carried = [each for each in network.inspection_values.carried if each.nbytes]
    assert set(costs.boundaries) == {
        point for point in range(1, len(network.names)) if not any(each.first <= point <= each.last for each in carried)
    }
    trained = sum(p.nbytes for p in network.parameters() if p.requires_grad)
    there = sum(each.nbytes for each in (*network.parameters(), *network.buffers()))
    scales = len(costs.fixed) * model.scale.nbytes  # every stage may be on a rank of its own
    assert there + trained <= sum(costs.fixed) <= there + trained + scales
