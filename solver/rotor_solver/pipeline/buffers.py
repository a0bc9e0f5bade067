"""What torch.distributed.pipelining holds on a rank beside the microbatches in flight (`stage.py` of torch 2.13)."""

from __future__ import annotations

from rotor_solver.chain import Chain
from rotor_solver.pipeline.in_flight import InFlight
from rotor_solver.pipeline.schedules import Schedule


def torch_buffers(part: Chain, number: int, schedule: Schedule, flying: InFlight) -> int:
    """Bytes for part `number` beyond those of `flying` microbatches, from the beginning of a step to its end.

    A stage of torch has a buffer for every microbatch to receive an input in (`args_recv_info`; the first part has the
    inputs themselves), and one to receive the output's gradient (`grad_recv_info`). The last part keeps all outputs
    (`output_chunks`). Gradients of inputs are there until they are sent: one at a time in 1f1b, in the other schedules
    perhaps to the end of the step.
    """
    first, last, count = number == 0, number == schedule.parts - 1, schedule.microbatches
    waiting = count - flying.forwards
    incoming, outgoing = part.input_bytes, part.activation[-1]
    received = waiting * incoming + (waiting if last else count) * outgoing
    sent = 0 if first else incoming * (1 if schedule.name == "1f1b" else count)
    return received + sent
