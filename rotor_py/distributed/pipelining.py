"""What a schedule of `torch.distributed.pipelining` asks of the memory of one rank.

A `Checkpointable` is the module of a `PipelineStage`, as any module is. Each rank has a model and a plan of its own:
nothing is agreed upon between the ranks of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from rotor_profiling import bytes_like, tensors_in
from rotor_py.errors import InvalidValueError


def microbatches_in_flight(schedule: Any) -> dict[int, int]:
    """The most microbatches that each stage of this rank has in flight at once, by the stage's index in the pipeline.

    A microbatch is in flight from its forward until its backward is through. Where the schedule has one backward for
    inputs and another for weights, that is the second, unless the stage does both at once (see `whole_backward`).
    ValueError for a schedule that does not tell what it runs.
    """
    stages = {stage.stage_index: stage for stage in stages_of(schedule)}
    if isinstance(schedule, ScheduleGPipe | Schedule1F1B):
        # They run without a list of actions, or by another than they show: releases of torch differ.
        ((index, stage),) = stages.items()
        count = schedule._n_microbatches
        return {index: count if isinstance(schedule, ScheduleGPipe) else min(count, stage.num_stages - index)}
    now: Counter[int] = Counter()
    most = dict.fromkeys(stages, 0)
    for index, kind in _actions(schedule):
        ends = "I" if stages[index].dw_builder is not None else "W"
        if kind == "F":
            now[index] += 1
            most[index] = max(most[index], now[index])
        elif kind in ("B", ends):
            now[index] -= 1
    return most


def stages_of(schedule: Any) -> list[PipelineStage]:
    """The stages that a schedule runs on this rank."""
    # Attributes of torch's own: nothing public tells.
    several: Any = getattr(schedule, "_stages", None)
    if several is None:
        several = [getattr(schedule, "_stage", None)]
    return list(several)


def _actions(schedule: Any) -> Iterator[tuple[int, str]]:
    """Index of the stage and kind of everything that this rank computes, in order: F, B, or I and W."""
    order = getattr(schedule, "pipeline_order", None)
    if not order:
        raise InvalidValueError(
            f"{type(schedule).__name__} has no pipeline_order, which would tell what it runs in which order",
            kind="unknown_schedule",
            name=type(schedule).__name__,
        )
    pending = [action for action in reversed(order[schedule.rank]) if action is not None]
    while pending:
        action = pending.pop()
        if parts := getattr(action, "sub_actions", None):  # a forward and a backward that overlap
            pending.extend(reversed(parts))
        else:
            yield action.stage_index, action.computation_type.value


def buffer_bytes(schedule: Any, stage: PipelineStage, received: Any, returned: Any) -> int:
    """Bytes that a step of `schedule` holds, at most, to receive and send inputs and gradients for one of its stages.

    `received` and `returned` are the input and the output of the stage for one microbatch: tensors, which may be on the
    device "meta", or nested structures of them. Take the bytes off the limit of the stage's model: its plan knows one
    input and one gradient of its output.
    """
    own, index = {each.stage_index for each in stages_of(schedule)}, stage.stage_index
    count: int = schedule._n_microbatches
    inputs = 0 if stage.is_first else bytes_like(tensors_in(received))
    outputs = 0 if stage.is_last else bytes_like(tensors_in(returned))
    # Memory to receive in is there for all microbatches, from the first step on. What goes to another rank is held
    # until the schedule waits for it: right away, after all backwards, or after all that is sent in the step.
    sent = (0 if index - 1 in own else inputs, 0 if index + 1 in own else outputs)
    if isinstance(schedule, Schedule1F1B):
        held = sum(sent)
    elif isinstance(schedule, ScheduleGPipe):
        held = count * sent[0]  # outputs are in flight anyway
    else:
        held = count * sum(sent)
    return count * (inputs + outputs) + held


def whole_backward() -> Callable[[], None]:
    """A `dw_builder` for `PipelineStage`: the backward for weights runs along with the one for inputs.

    Without it, a zero-bubble schedule holds everything that a microbatch has kept from the first of its backwards to
    the second, and a gradient for every stage of the plan on top; with it, nothing. Stages that are run again compute
    both in the first anyway. The numbers are the same.
    """
    return _nothing_left


def _nothing_left() -> None:
    """Nothing is left to be done in the backward for weights."""
