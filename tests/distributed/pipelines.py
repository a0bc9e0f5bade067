"""What every process does in the tests of pipelines: each has a model of its own, which the next one's follows."""

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from rotor_py import Checkpointable
from rotor_py.distributed.pipelining import buffer_bytes, microbatches_in_flight, whole_backward
from tests.checkpointable.steps import Stack, between, planned_at
from tests.distributed import steps
from tests.distributed.processes import device, here, kept, least_peak, logs, present_bytes, random_state
from tests.training.stepping import Block

SCHEDULES: dict[str, Any] = {
    "GPipe": schedules.ScheduleGPipe,
    "1F1B": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBV": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}
SINGLE = ("GPipe", "1F1B")
"""Schedules with one stage per rank; the others have two here."""
V = ("ZBV", "DualPipeV")
"""Schedules in which the first rank has the first and the last stage."""
SAMPLES, WIDTH = 128, 32
"""of one microbatch"""


def chain(count: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def made(kind: str, index: int) -> nn.Module:
    """The module of a stage: each has another number of layers."""
    torch.manual_seed(index)
    if kind == "layer":
        return nn.Linear(WIDTH, WIDTH, bias=False)
    return (chain(3 + index % 2) if kind == "chain" else Stack(*(Block(WIDTH) for _ in range(3 + index % 2)))).train()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def indices(name: str, rank: int) -> list[int]:
    count = dist.get_world_size()
    if name in SINGLE:
        return [rank]
    return [rank, 2 * count - 1 - rank] if name in V else [rank, rank + count]


def microbatches(name: str) -> int:
    count = dist.get_world_size()
    return 4 * count if name == "DualPipeV" else 2 * count


class Pipeline:
    """The stages of one process, and their schedule. A `share` plans each, so much of the way to storing everything."""

    def __init__(self, rank: int, name: str, kind: str, share: float | None, options: Any, count: int = 0) -> None:
        self.rank, self.name = rank, name
        self.microbatches = count or microbatches(name)
        own, number = indices(name, rank), dist.get_world_size() * (1 if name in SINGLE else 2)
        self.models = [made(kind, i) if share is None else self._planned(made(kind, i), i, share) for i in own]
        named = zip(self.models, own, strict=True)
        self.stages = [PipelineStage(model, index, number, device(), **options) for model, index in named]
        stages = self.stages[0] if name in SINGLE else self.stages
        self.schedule = SCHEDULES[name](stages, self.microbatches, loss_fn=loss)
        self.first, self.last = 0 in own, number - 1 in own

    def follow(self, planned: list[Any]) -> None:
        """Have these models run in place of the stages' own."""
        for stage, model in zip(self.stages, planned, strict=True):
            stage.submod = model
        self.models = planned

    def _planned(self, model: nn.Module, index: int, share: float) -> Checkpointable:
        return planned_at(share, model, torch.randn(SAMPLES, WIDTH, requires_grad=index > 0), loss=None)

    def batch(self, step: int) -> list[torch.Tensor]:
        generator = torch.Generator("cpu").manual_seed(step)
        shape = (self.microbatches * SAMPLES, WIDTH)
        return [here(torch.randn(shape, generator=generator, device="cpu")) for _ in range(2)]

    def step(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        value, target = given
        options: dict[str, Any] = {"target": target, "losses": losses} if self.last else {}
        self.schedule.step(*([value] if self.first else []), **options, return_outputs=False)
        return losses


def trained(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    torch.manual_seed(pipeline.rank)
    parameters = [(f"{i} {name}", p) for i, m in enumerate(pipeline.models) for name, p in m.named_parameters()]
    optimizer = torch.optim.SGD([p for _, p in parameters], lr=0.1)
    numbers: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        for number, value in enumerate(pipeline.step(pipeline.batch(step))):
            numbers[f"loss {step} {number}"] = kept(value)
        for name, parameter in parameters:
            assert parameter.grad is not None, name
            numbers[f"gradient {step} {name}"] = kept(parameter.grad)
        optimizer.step()
    return numbers | {name: kept(p) for name, p in parameters} | {"random": random_state()}


def different(pipeline: Pipeline, expected: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    wrong = steps.different(trained(pipeline), expected)
    return [str(model.sequence) for model in pipeline.models], wrong


def same_as_plain(rank: int, name: str, kind: str, share: float, whole: bool = False) -> tuple[list[str], list[str]]:
    """The sequences, and the names of numbers that differ from plain pipelining."""
    expected = trained(Pipeline(rank, name, kind, None, {}))
    return different(Pipeline(rank, name, kind, share, {"dw_builder": whole_backward} if whole else {}), expected)


def planned_in_the_first_step(rank: int, name: str, limit: int) -> tuple[list[str], list[str]]:
    """As `same_as_plain`, with models that are planned when the first microbatch comes."""
    expected = trained(Pipeline(rank, name, "chain", None, {}))
    pipeline = Pipeline(rank, name, "chain", None, {})
    # On one device, each model is beside the others and what they hold.
    limit += present_bytes() + (device().type == "cuda") * 10**5 * (len(pipeline.models) - 1)
    models = enumerate(pipeline.models)
    pipeline.follow([Checkpointable(model, mem_limit=limit + (index > 0) * 10**5) for index, model in models])
    return different(pipeline, expected)


def planned_for_flight(rank: int, name: str, kind: str, share: float, whole: bool) -> tuple[Pipeline, int, int]:
    """A pipeline with plans for what is in flight. The bytes that this rank was given, and those that it should take.

    Given are the limits of its stages, what it sends and receives in, and its part of the batch.
    """
    pipeline = Pipeline(rank, name, kind, None, {"dw_builder": whole_backward} if whole else {})
    flying = microbatches_in_flight(pipeline.schedule)
    sample, given = torch.zeros(SAMPLES, WIDTH), pipeline.batch(0)
    beside = sum(each.nbytes for each in given[:1] * pipeline.first + given[1:] * pipeline.last)
    allowed = predicted = beside
    planned = []
    for stage, module in zip(pipeline.stages, pipeline.models, strict=True):
        model = Checkpointable(
            module,
            loss=(lambda output: loss(output, torch.zeros_like(output))) if stage.is_last else None,
            forwards_in_flight=flying[stage.stage_index],
            watch=False,
        )
        model.measure(sample.clone().requires_grad_(not stage.is_first))
        sequence = model.compute_sequence(between(model, share))
        buffers = buffer_bytes(pipeline.schedule, stage, sample, sample)
        allowed += model.mem_limit + buffers  # type: ignore[operator] # bytes
        predicted += model.budget.peak_bytes(sequence) + buffers
        planned.append(model)
    pipeline.follow(planned)
    return pipeline, allowed, predicted


def peak_in_flight(pipeline: Pipeline, enough: int = 0) -> int:
    """The measured peak of a rank in the third step, its part of the batch included; see `least_peak`."""
    given = pipeline.batch(0)
    for _ in range(2):
        pipeline.step(given)
    parameters = [p for model in pipeline.models for p in model.parameters()]
    buffers = [buffer for stage in pipeline.stages for buffer in received(stage)]
    mine = given[:1] * pipeline.first + given[1:] * pipeline.last
    present = [*parameters, *(p.grad for p in parameters if p.grad is not None), *buffers, *mine]
    dist.barrier()
    return least_peak(lambda: pipeline.step(given), present, enough)


def inside(rank: int, name: str, whole: bool) -> tuple[int, int, list[str]]:
    """The measured peak of a rank with plans for what is in flight, the bytes it was given, and what was logged."""
    pipeline, allowed, _ = planned_for_flight(rank, name, "chain", 0.0, whole)
    with logs() as said:
        measured = peak_in_flight(pipeline, allowed)
    return measured, allowed, said


def warnings_of(rank: int, name: str) -> list[str]:
    """What is logged of a step by models that are planned for one forward at a time."""
    pipeline = Pipeline(rank, name, "chain", 0.3, {})
    with logs() as said:
        pipeline.step(pipeline.batch(0))
    return said


def received(stage: PipelineStage) -> list[torch.Tensor]:
    """Everything that a stage has to receive in. The placeholder for what comes from no rank may lack the attribute."""
    infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    found = [getattr(info, "buffer", None) for each in infos for info in each]
    return [buffer for buffer in found if buffer is not None]


def buffers(rank: int, name: str) -> tuple[list[int], list[int]]:
    """By how many bytes a step takes more with twice the microbatches: in truth, and as is said beforehand.

    Stages are single layers, and what is in flight does not grow. What they have to receive in is there already.
    """
    sample, found, said = torch.empty(SAMPLES, WIDTH, device="meta"), [], []
    for count in (microbatches(name), 2 * microbatches(name)):
        pipeline = Pipeline(rank, name, "layer", None, {}, count)
        given = pipeline.batch(0)
        for _ in range(2):
            pipeline.step(given)
        there = [buffer for stage in pipeline.stages for buffer in received(stage)]
        said.append(sum(buffer_bytes(pipeline.schedule, stage, sample, sample) for stage in pipeline.stages))
        # The first is measured as closely as can be: from that follows what is enough for the second.
        enough = found[0] + said[1] - said[0] if found else 0
        found.append(least_peak(partial(pipeline.step, given), there, enough))
    return found, said


def flights(rank: int, name: str, whole: bool) -> tuple[dict[int, int], dict[int, int]]:
    """The most microbatches in flight during a real step, counted, and what is read off the schedule."""
    pipeline = Pipeline(rank, name, "chain", None, {"dw_builder": whole_backward} if whole else {})
    pipeline.step(pipeline.batch(0))
    now: Counter[int] = Counter()
    most = {stage.stage_index: 0 for stage in pipeline.stages}

    def counted(stage: PipelineStage, method: str, change: Any) -> None:
        run = getattr(stage, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            now[stage.stage_index] += change(kwargs)
            most[stage.stage_index] = max(most[stage.stage_index], now[stage.stage_index])
            return result

        setattr(stage, method, call)

    for stage in pipeline.stages:
        counted(stage, "forward_one_chunk", lambda options: 1)
        counted(stage, "backward_one_chunk", lambda options: -(whole or options.get("full_backward", True)))
        counted(stage, "backward_weight_one_chunk", lambda options: -(not whole))
    pipeline.step(pipeline.batch(0))
    assert not any(now.values())
    return most, microbatches_in_flight(pipeline.schedule)
