"""What excludes that the model is cut for a pipeline, and what is about that alone."""

from __future__ import annotations

from rotor_cli.errors import usage
from rotor_cli.request import Request


def refuse_pipeline(request: Request) -> None:
    """Failure for options that are about one process, beside `--pipeline`, or about several without it."""
    of_pipelines = {"--microbatches": request.microbatches, "--virtual-stages": request.virtual_stages}
    if request.pipeline is None:
        given = [name for name, value in of_pipelines.items() if value is not None]
        if given or request.schedule != "1f1b":
            raise usage(f"{(*given, '--schedule')[0]} is about a pipeline; add --pipeline RANKS")
        return
    alone = {
        "--max-overhead": request.max_overhead,
        "--fresh-grads": request.fresh_grads,
        "--step-in-backward": request.step_in_backward,
        "--keep": request.keep,
        "--offload": request.offload,
        "--backward-order": request.backward_order != "any",
        "--verify": request.verify,
        "--compare": request.compare,
        "--sweep": request.sweep,
        "--save": request.plan_file,
        "--trace": request.trace_file,
        "--html": request.html_file,
        "--compile": request.compile,
        f"--batch {request.batch}": request.batch_aim,
    }
    for name, value in alone.items():
        if value:
            raise usage(f"--pipeline plans for several processes, and {name} is about one; leave one of them out")
    from rotor_solver import Schedule

    try:
        Schedule(request.schedule, request.pipeline, request.microbatches_or_default, request.virtual_stages_or_default)
    except ValueError as error:
        raise usage(f"--pipeline: {error}") from error
