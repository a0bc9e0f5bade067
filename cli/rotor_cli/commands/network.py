"""The network as it is asked for: made of what the model file has, measured, and written in Python."""

from __future__ import annotations

import torch

from rotor_cli.errors import INFEASIBLE, Failure, usage
from rotor_cli.loading.model_file import ModelFile
from rotor_cli.loading.place import Place
from rotor_cli.request import Request
from rotor_py import Checkpointable, InfeasibleError
from rotor_py.offload.offload import checked_name
from rotor_py.plan.conflicts.step_in_backward import refuse_optimizer
from rotor_py.predict.operators.autocast import region
from rotor_py.report.progress import Activities
from rotor_py.trials.default_loss import default_loss


def measured_network(
    found: ModelFile, limit: int | None, request: Request, shown: Activities, place: Place
) -> Checkpointable:
    """The network of a model file, measured on its sample, in `place`; `limit` is in bytes.

    Failure where an option cannot be had, or where the step is above the limit by what is known before measuring.
    """
    if request.step_in_backward:
        _refuse_optimizer(found.optimizer)
    refuse_offload(request)
    network = Checkpointable(
        found.model,
        mem_limit=limit,
        mem_slots=request.slots,
        loss=found.loss or default_loss,  # `verify` takes it, too: what is predicted is what is measured
        optimizer=found.optimizer,
        fresh_grads=request.fresh_grads,
        forwards_in_flight=request.forwards_in_flight,
        backward_order=request.backward_order,
        progress=shown.doing("measuring"),
        cache=not request.no_cache,
        compile=request.compile,
        step_in_backward=found.optimizer if request.step_in_backward else None,
        keep=request.keep,
        offload=request.offload,
    )
    if request.limited and request.overhead is None:
        try:
            network.refuse_what_cannot_fit(found.sample)
        except InfeasibleError as error:
            raise Failure(str(error), INFEASIBLE) from error
    with region(place.autocast):
        network.measure(found.sample, closely=request.overhead is not None)
    return network


def refuse_offload(request: Request) -> None:
    """Failure for a tier that there is not, or not here."""
    if request.offload is not None:
        try:
            checked_name(request.offload)
        except ValueError as error:
            raise usage(f"--offload: {error}") from error


def _refuse_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    """Failure for an optimizer of the model file that cannot step in the backward."""
    if optimizer is None:
        raise usage("--step-in-backward needs an optimizer; define `optimizer` in the model file")
    try:
        refuse_optimizer(optimizer)
    except ValueError as error:
        raise usage(f"--step-in-backward: {error}") from error


def arguments_in_python(found: ModelFile, network: Checkpointable, request: Request) -> tuple[str, ...]:
    """What `Checkpointable` has to be given beside the limit to plan the same."""
    optimizer = "step_in_backward" if request.step_in_backward else "optimizer"
    forwards, order = network.forwards_in_flight, request.backward_order
    given = {
        "loss=loss": found.loss is not None,
        f"{optimizer}=optimizer": found.optimizer is not None,
        "fresh_grads=True": network.fresh_grads,
        f"forwards_in_flight={forwards}": forwards > 1,
        f"backward_order={order!r}": forwards > 1 and order != "any",
        "compile=True": request.compile,
        f'keep="{request.keep}"': request.keep is not None,
        f"offload={request.offload!r}": request.offload is not None,
    }
    return tuple(argument for argument, asked in given.items() if asked)
