"""Microbatches in flight and communication buffers of one rank in a schedule of `torch.distributed.pipelining`.

The module of a `PipelineStage` may be a `Checkpointable`. Each rank plans its own stages, without the other ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from rotor_profiling import bytes_like, tensors_in
from rotor_py.errors import InvalidValueError


def microbatches_in_flight(schedule: Any) -> dict[int, int]:
    """Return, for the index of each of this rank's stages, the maximum number of microbatches in flight at once.

    A microbatch is in flight from its forward to the end of its backward. If the schedule splits the backward into one
    for inputs and one for weights, the flight ends with the latter, or with the former if the stage computes all
    gradients in it (see `whole_backward`). Raises ValueError for a schedule that does not expose its actions.
    """
    stages = {stage.stage_index: stage for stage in stages_of(schedule)}
    if isinstance(schedule, ScheduleGPipe | Schedule1F1B):
        # In some releases of torch, these schedules have no list of actions; in others, they do not follow theirs.
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
    return list(getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)])  # torch has no public name


def _actions(schedule: Any) -> Iterator[tuple[int, str]]:
    """Yield stage index and type of this rank's computations: forward F, backward B or its parts I (inputs), W."""
    order = getattr(schedule, "pipeline_order", None)
    if not order:
        message = f"schedule must have a list of its actions, pipeline_order, got {type(schedule).__name__}"
        raise InvalidValueError(message, kind="unknown_schedule", name=type(schedule).__name__)
    pending = [action for action in reversed(order[schedule.rank]) if action is not None]
    while pending:
        action = pending.pop()
        if parts := getattr(action, "sub_actions", None):  # a forward and a backward that overlap
            pending.extend(reversed(parts))
        else:
            yield action.stage_index, action.computation_type.value


def buffer_bytes(schedule: Any, stage: PipelineStage, received: Any, returned: Any) -> int:
    """Return the peak bytes of the tensors that one stage sends and receives in a step of `schedule`.

    `received` and `returned` are the input and output of the stage for one microbatch: tensors, possibly on the device
    "meta", or nested structures of tensors. Subtract the bytes from the limit of the stage's model: its plan counts
    only one input and one gradient of its output.
    """
    own, index = {each.stage_index for each in stages_of(schedule)}, stage.stage_index
    count: int = schedule._n_microbatches
    inputs = 0 if stage.is_first else bytes_like(tensors_in(received))
    outputs = 0 if stage.is_last else bytes_like(tensors_in(returned))
    # A stage has receive buffers for all microbatches of a step. A sent tensor stays in memory until the schedule waits
    # for its send: right afterwards (1F1B), after all backwards (GPipe), or after all sends of the step (others).
    sent = (0 if index - 1 in own else inputs, 0 if index + 1 in own else outputs)
    if isinstance(schedule, Schedule1F1B):
        return count * (inputs + outputs) + sum(sent)
    # With GPipe, all outputs stay in memory until their backwards anyway, so sending them takes no further memory.
    return count * (inputs + outputs + (sent[0] if isinstance(schedule, ScheduleGPipe) else sum(sent)))


def whole_backward() -> Callable[[], None]:
    """Pass this as the `dw_builder` of `PipelineStage`, to compute weight gradients along with input gradients.

    Without it, a zero-bubble schedule keeps a microbatch's saved tensors and output gradients until its backward for
    weights. A recomputed stage needs none: its backward for inputs computes all gradients, which are the same.
    """
    return lambda: None
