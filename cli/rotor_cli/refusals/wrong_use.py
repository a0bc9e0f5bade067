"""Everything that is refused before the model is loaded: a typing error must not cost a run of minutes."""

from __future__ import annotations

from rotor_cli.errors import usage
from rotor_cli.loading.target import refuse_missing_module, split_target
from rotor_cli.loading.wanted import refuse_file_without
from rotor_cli.refusals.batch import refuse_batch
from rotor_cli.refusals.device import refuse_device
from rotor_cli.refusals.files import refuse_plot, refuse_unwritable_files
from rotor_cli.refusals.pipeline import refuse_pipeline
from rotor_cli.refusals.script import refuse_script
from rotor_cli.refusals.sizes import refuse_sizes
from rotor_cli.refusals.values import refuse_values
from rotor_cli.request import Request


def refuse_wrong_use(request: Request) -> None:
    """Failure for options that exclude each other, for texts that say nothing, and for files that are not there or
    cannot be written. Nothing is loaded for it.
    """
    location, name = split_target(request.model)
    refuse_script(request)
    refuse_sizes(request)
    refuse_device(request)
    refuse_values(request)
    refuse_unwritable_files(request)
    if request.overhead is not None and request.mem_limit is not None:  # in this order: a share that is none is refused
        raise usage("--mem-limit and --max-overhead both say how to plan; give one of them")
    refuse_plot(request)
    refuse_pipeline(request)
    refuse_batch(request)
    _refuse_step_in_backward(request)
    _refuse_offload(request)
    if request.backward_order != "any" and request.forwards_in_flight == 1:
        raise usage("--backward-order is about several forwards in flight; add --forwards-in-flight 2")
    if not location.endswith(".py"):
        refuse_missing_module(location)
    elif not request.as_script:
        refuse_file_without(name, location)


def _refuse_step_in_backward(request: Request) -> None:
    if not request.step_in_backward:
        return
    if request.forwards_in_flight > 1:
        raise usage(
            "--step-in-backward steps parameters in the first backward, and others are still in flight then; leave "
            "out --forwards-in-flight"
        )
    if request.batch_aim is not None:
        raise usage(
            f"--batch {request.batch_aim} looks at plain steps; leave out --step-in-backward, and plan with it "
            "for the batch that it finds"
        )


def _refuse_offload(request: Request) -> None:
    if request.offload is None:
        return
    others = {
        "--forwards-in-flight": (request.forwards_in_flight > 1, "has several forwards share the way there"),
        "--compile": (request.compile, "has Inductor decide what a stage saves"),
    }
    for option, (given, does) in others.items():
        if given:
            raise usage(f"--offload has a plan move what stages save, and {option} {does}; leave one of them out")
