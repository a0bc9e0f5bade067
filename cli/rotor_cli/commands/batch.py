"""From a request to the batch that is chosen: `--batch max` and `--batch best`."""

from __future__ import annotations

from functools import partial

from rotor_cli.commands.network import refuse_offload
from rotor_cli.errors import INFEASIBLE, Failure, explained
from rotor_cli.loading.model_file import ModelFile
from rotor_cli.loading.place import Place, There
from rotor_cli.request import Request
from rotor_py import InfeasibleError, PlannedBatch, best_batch, largest_batch
from rotor_py.batch.choose import choose_elsewhere
from rotor_py.report.batch_choice import Aim
from rotor_py.report.progress import Activities


def choose(found: ModelFile, limit: int, request: Request, shown: Activities, place: Place) -> PlannedBatch:
    """The batch inside `limit` bytes, and the model planned for it. Failure if not even the smallest fits."""
    refuse_offload(request)
    aim: Aim = "max" if request.batch_aim == "max" else "best"
    choose_at = largest_batch if aim == "max" else best_batch
    if isinstance(place, There):
        keep = request.mem_limit is not None
        choose_at = partial(choose_elsewhere, aim, place, place.autocast, keep_limit=keep)
    # Where it is not here, inside of it again, so that what the model may not do there is told as what it is.
    with explained(found.file), place.measuring():
        try:
            return choose_at(
                found.model,
                found.sample_of,
                limit,
                loss=found.loss,
                optimizer=found.optimizer,
                fresh_grads=request.fresh_grads,
                multiple=request.batch_multiple,
                effective_batch=request.grad_accumulation,
                progress=shown.doing("measuring"),
                mem_slots=request.slots,
                forwards_in_flight=request.forwards_in_flight,
                backward_order=request.backward_order,
                cache=not request.no_cache,
                keep=request.keep,
                offload=request.offload,
            )
        except InfeasibleError as error:
            raise Failure(str(error), INFEASIBLE) from error
