"""From a request to the batch that is chosen: `--batch max` and `--batch best`."""

from __future__ import annotations

from rotor_cli.errors import INFEASIBLE, Failure, explained
from rotor_cli.loading.model_file import ModelFile
from rotor_cli.request import Request
from rotor_py import InfeasibleError, PlannedBatch, best_batch, largest_batch
from rotor_py.report.progress import Activities


def choose(found: ModelFile, limit: int, request: Request, shown: Activities) -> PlannedBatch:
    """The batch inside `limit` bytes, and the model planned for it. Failure if not even the smallest fits."""
    with explained(found.file):
        try:
            return (largest_batch if request.batch_aim == "max" else best_batch)(
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
            )
        except InfeasibleError as error:
            raise Failure(str(error), INFEASIBLE) from error
