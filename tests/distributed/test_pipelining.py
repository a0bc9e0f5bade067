"""A `Checkpointable` on each rank of a pipeline, under the schedules of torch; pipelines planned as a whole."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rotor_py import Checkpointable
from rotor_py.measure.pipeline_costs import pipeline_costs
from rotor_solver import Sequence, plan_pipeline
from tests.distributed import pipelines
from tests.distributed.pipelines import WIDTH, loss, received
from tests.distributed.processes import NOT_WHOLE, Processes, device, least_peak, present_bytes

SHARE = 0.3
"""How much of the way from the least possible limit to storing everything the models are planned for."""
SPLIT = ["zero-bubble", "ZBV", "DualPipeV"]
"""Schedules with one backward for inputs and one for weights."""
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def schedules_of_this_torch(request: pytest.FixtureRequest) -> None:
    """What torch 2.13 can do, and 2.11 cannot."""
    told = request.node.callspec.params
    if torch.__version__ >= "2.13":
        return
    if told.get("name") in pipelines.V and "gloo" in (told.get("processes"), told.get("four_processes")):
        pytest.skip("in the first step, a rank with two neighbouring stages sends to itself; gloo cannot")
    if (told.get("name"), told.get("kind")) == ("zero-bubble", "captured"):
        pytest.skip("the backward for weights adds up gradients of a node's outputs, here of several sizes")


def assert_same(found: list[tuple[list[str], list[str]]]) -> None:
    assert [different for _, different in found] == [[]] * len(found)
    assert all(re.search(NOT_WHOLE, sequence) for sequences, _ in found for sequence in sequences)


@pytest.mark.parametrize(
    ("kind", "name", "whole"),
    [
        ("chain", "1F1B", False),  # one stage per rank
        pytest.param("chain", "zero-bubble", True, marks=slow),  # two
        ("captured", "1F1B", False),
        pytest.param("captured", "zero-bubble", False, marks=slow),  # and two backwards
        pytest.param("chain", "DualPipeV", True, marks=slow),  # two stages side by side
    ],
)
def test_numbers_are_those_of_plain_pipelining(processes: Processes, kind: str, name: str, whole: bool) -> None:
    assert_same(processes.run(pipelines.same_as_plain, name, kind, SHARE, whole))


@slow
def test_four_processes(four_processes: Processes) -> None:
    assert_same(four_processes.run(pipelines.same_as_plain, "ZBV", "chain", SHARE))


def test_models_are_planned_in_the_first_step_each_for_itself(processes: Processes) -> None:
    """torch may run a first microbatch of uninitialized memory, to infer shapes. No rank waits for another's plan."""
    found = processes.run(pipelines.planned_in_the_first_step, "1F1B", 200_000)
    assert_same(found)
    if len(found) > 1:
        assert len({sequence for sequences, _ in found for sequence in sequences}) > 1


@pytest.mark.parametrize("name", pipelines.SCHEDULES)
def test_the_schedule_tells_how_many_microbatches_are_in_flight(processes: Processes, name: str) -> None:
    for whole in (False, True) if name in SPLIT else (False,):
        for counted, said in processes.run(pipelines.flights, name, whole):
            assert said == counted


def test_bytes_to_send_and_receive_are_known_beforehand(processes: Processes) -> None:
    if len(processes.processes) == 1:
        pytest.skip("a single device sends nothing")
    for found, said in processes.run(pipelines.buffers, "1F1B"):
        # Losses and counters are a few bytes per microbatch.
        assert said[1] - said[0] == pytest.approx(found[1] - found[0], abs=200)


@pytest.mark.parametrize("name", ["1F1B", pytest.param("zero-bubble", marks=slow)])
def test_the_peak_of_every_rank_is_inside_its_limit(processes: Processes, name: str) -> None:
    """With plans for the microbatches that the schedule keeps in flight, which no plan for one would be."""
    found = processes.run(pipelines.inside, name, name in SPLIT)
    for measured, allowed, said in found:
        assert measured <= allowed
        assert said == []


def test_a_warning_says_what_two_backwards_hold_and_what_to_write(processes: Processes) -> None:
    for said in processes.run(pipelines.warnings_of, "zero-bubble"):
        assert any("dw_builder=" in each for each in said)


SAMPLES, MICROBATCHES = 512, 6


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]


def planned(share: float) -> list[Any]:
    """The limit; and the first stage, end, sequence and peak of each rank: as found by rank 0, since times differ."""
    target = torch.randn(SAMPLES, WIDTH)
    network = Checkpointable(nn.Sequential(*layers()), loss=lambda output: loss(output, target))
    network.measure(torch.randn(SAMPLES, WIDTH))
    measured = network.inspection_values, network.device
    costs = pipeline_costs(network.model, network.functions, *measured, microbatches=MICROBATCHES)

    def within(limit: int) -> Any:
        options: dict[str, Any] = {"fixed": costs.fixed, "buffers": True}
        return plan_pipeline(costs.chain, dist.get_world_size(), limit, MICROBATCHES, "1f1b", **options)

    limit = int(share * max(within(2**40).timeline.peaks))
    parts = [(part.begin, part.end, str(part.sequence), part.peak_bytes) for part in within(limit).parts]
    found: list[Any] = [limit, parts]
    dist.broadcast_object_list(found)
    return found


def peak(rank: int, share: float) -> tuple[int, int, int, str]:
    """The measured peak of a rank in a step, the predicted one, the limit, and the sequence."""
    limit, parts = planned(share)
    begin, end, text, predicted = parts[rank]
    first, last = rank == 0, rank == len(parts) - 1
    model = Checkpointable(nn.Sequential(*layers()[begin:end]), torch.randn(SAMPLES, WIDTH, requires_grad=not first))
    model.sequence = Sequence.parse(text)
    pipeline = Schedule1F1B(PipelineStage(model, rank, len(parts), device()), MICROBATCHES, loss_fn=loss)
    batch, target = (torch.randn(MICROBATCHES * SAMPLES, WIDTH) for _ in range(2))

    def step() -> None:
        pipeline.step(*([batch] if first else []), **({"target": target} if last else {}))

    for _ in range(2):
        step()
    buffers = received(pipeline._stage)
    parameters = list(model.parameters())
    # The target belongs to the loss, which the caller hands in.
    present = [*parameters, *(p.grad for p in parameters), *buffers, *([batch] if first else [])]
    dist.barrier()
    # Costs of a pipeline are those of its step alone, and on CUDA all that the process has is measured.
    beside = max(0, present_bytes() - sum(each.nbytes for each in present))
    return least_peak(step, present, min(predicted, limit) + beside) - beside, predicted, limit, text


def test_the_measured_peak_of_every_rank_of_a_planned_pipeline_is_inside_the_limit(processes: Processes) -> None:
    found = processes.run(peak, 0.75)
    for measured, predicted, limit, _ in found:
        assert 0.9 * predicted <= measured <= 1.001 * predicted <= 1.001 * limit
        assert measured <= limit
    assert any("CF_" in sequence for *_, sequence in found)
