"""What torch.distributed.pipelining holds on a rank beside the microbatches in flight (`stage.py` of torch 2.13)."""

from __future__ import annotations

from rotor_solver.chain import Chain
from rotor_solver.pipeline.in_flight import InFlight
from rotor_solver.pipeline.schedules import Schedule


def buffer_bytes(part: Chain, number: int, schedule: Schedule, flying: InFlight) -> int:
    """Bytes for part `number` beyond those of `flying` microbatches, from the beginning of a step to its end.

    A stage of torch has a buffer for every microbatch to receive an input in (`args_recv_info`; the first part has the
    inputs themselves), and one to receive the output's gradient (`grad_recv_info`). The last part keeps all outputs
    (`output_chunks`). What is sent, outputs and gradients of inputs, is held until the schedule waits for it: right
    away in 1f1b, after all backwards in gpipe, at the end of the step in the others.
    """
    first, last, count = number == 0, number == schedule.parts - 1, schedule.microbatches
    others = count - flying.forwards  # the chain's simulation has the inputs and outputs of those in flight
    incoming, outgoing = part.input_bytes, part.activation[-1]
    gradients = 0 if first else incoming * (1 if schedule.name == "1f1b" else count)
    if last:
        return others * (incoming + outgoing) + gradients
    sent = 0 if schedule.name in ("gpipe", "1f1b") else others * outgoing
    return others * incoming + count * outgoing + gradients + sent
