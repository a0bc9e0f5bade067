"""What torch.distributed.pipelining holds on a rank beside the microbatches in flight (`stage.py` of torch 2.13)."""

from __future__ import annotations

from rotor_solver.chain import Chain
from rotor_solver.pipeline.in_flight import InFlight
from rotor_solver.pipeline.schedules import Schedule


def buffer_bytes(part: Chain, number: int, schedule: Schedule, flying: InFlight) -> int:
    """Bytes for part `number` beyond those of `flying` microbatches, from the beginning of a step to its end.

    A stage of torch has a buffer for every microbatch to receive an input in (`args_recv_info`; the first part has the
    inputs themselves), and one to receive the output's gradient (`grad_recv_info`). The last part keeps all outputs
    (`output_chunks`), and computes the loss right after each forward: what that keeps is at most its scratch memory.
    What is sent, outputs and gradients of inputs, is held until the schedule waits for it: one tensor at a time in
    1f1b, gradients to the end of all backwards in gpipe, everything to the end of the step in the others.
    """
    first, last, count = number == 0, number == schedule.parts - 1, schedule.microbatches
    others = count - flying.forwards  # the chain's simulation has the inputs and outputs of those in flight
    incoming, outgoing = part.input_bytes, part.activation[-1]
    gradients = 0 if first else _gradients(incoming, outgoing, schedule)
    if last:
        return others * (incoming + outgoing) + gradients + (flying.forwards - 1) * part.loss_temp
    sent = {"gpipe": 0, "1f1b": outgoing}.get(schedule.name, others * outgoing)
    # The simulation makes a gradient of the output, too, where here it is in its buffer. That stands for the output,
    # which is held throughout the backward: stages are measured without anybody holding their output.
    return others * incoming + count * outgoing + gradients + sent


def _gradients(incoming: int, outgoing: int, schedule: Schedule) -> int:
    """Gradients of inputs that have been sent, as far as they are there at the peak."""
    match schedule.name:
        case "1f1b":
            return incoming
        case "gpipe":  # each takes the place of a microbatch that is done with, and held an output at least
            return incoming + (schedule.microbatches - 1) * max(0, incoming - outgoing)
        case _:
            return incoming * schedule.microbatches
