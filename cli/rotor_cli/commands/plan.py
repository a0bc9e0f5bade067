"""From a request to all facts: load the model, measure it, plan, compare, and train steps to verify."""

from __future__ import annotations

from dataclasses import replace

from rotor_cli.commands.batch import choose
from rotor_cli.commands.network import arguments_in_python, measured_network
from rotor_cli.errors import INFEASIBLE, Failure, explained
from rotor_cli.facts import Facts, Taken
from rotor_cli.loading.device import limit_on, place_for
from rotor_cli.loading.model_file import ModelFile, load
from rotor_cli.loading.place import Place
from rotor_cli.reporters.text import console
from rotor_cli.request import Request
from rotor_py import Checkpointable, InfeasibleError, verify
from rotor_py.measure.device import limit_bytes
from rotor_py.predict.operators.autocast import region
from rotor_py.predict.recurrent import recurrent_layers
from rotor_py.predict.training_step import TrainingStep
from rotor_py.report.batch_choice import BatchChoice
from rotor_py.report.progress import Activities, activities
from rotor_py.report.sweeping import sweep_of
from rotor_py.report.terminal.stage_table import StageTable
from rotor_py.trials.comparison import compare_at_limit, leanest_of_each, with_verified
from rotor_py.trials.default_loss import default_loss
from rotor_solver import store_all, watched


def plan(request: Request) -> Facts:
    """All facts that are asked for; on a terminal, with a line about what is being done.

    Failure, with the exit code that the command's help names, if that cannot be done.
    """
    with activities(quiet=request.quiet) as shown:
        place = place_for(request)
        # Read before the model is loaded, which may take long: a typing error is told at once.
        limit = None
        if request.limited and request.overhead is None:
            with place.measuring():
                limit = limit_on(place.device, request.mem_limit)
        with place.together():
            shown.doing("loading")(0, 0, request.model)
            found = load(
                request.model,
                place,
                request.batch_size,
                request.shape,
                request.config,
                dtype=request.dtype,
                optimizer=request.optimizer,
            )
            with place.measuring():
                return _planned(found, limit, request, shown, place)


def _planned(found: ModelFile, limit: int | None, request: Request, shown: Activities, place: Place) -> Facts:
    chosen = None
    if request.batch_aim is None:
        # Inside of it again, so that what the model may not do there is told as what it is.
        with explained(found.file), place.measuring():
            network = measured_network(found, limit, request, shown, place)
            place.follow(_step(network, found, request, place))
    else:
        assert limit is not None
        chosen = choose(found, limit, request, shown, place)
        limit = chosen.mem_limit
        network, found = chosen.network, replace(found, sample=found.sample_of(chosen.batch))
    return facts_of(found, network, limit, request, shown, chosen=chosen, place=place)


def facts_of(
    found: ModelFile,
    network: Checkpointable,
    limit: int | None,
    request: Request,
    shown: Activities,
    *,
    chosen: BatchChoice | None = None,
    taken: Taken | None = None,
    place: Place | None = None,
) -> Facts:
    """All facts that are asked for about `network`, which has been measured on the sample of `found`.

    `chosen` is how the batch was chosen, `taken` what a script has shown, and `place` where the model was measured, if
    not on its own device. Failure as from `plan`.
    """
    facts = replace(_stored(found, network, request), batches=chosen, taken=taken)
    if place is not None and place.predicted_for is not None:
        recurrent = recurrent_layers(network.model, place.predicted_for.each)
        facts = replace(facts, device=place.name, predicted_for=place.predicted_for, recurrent=recurrent)
    if request.sweep or request.overhead is not None:
        facts = _sweep(facts, network, request, shown)
    if request.limited:
        with watched(shown.doing("solving")):
            facts = _plan(facts, network, limit, request)
        if place is not None and place.predicted_for is not None:
            shown.doing("following")(0, 0, "a step by the plan")
            with explained(found.file), place.measuring():
                facts = _reserve(facts, network, found, request, place)
    if request.plan_file is not None:
        with region(None if place is None else place.autocast):  # the file says what it was planned under
            network.save_plan(request.plan_file)
    if request.compare:
        compared = compare_at_limit(facts, network.model, request.slots, shown.doing("comparing"))
        facts = replace(facts, compared=compared)
    return _verify(facts, network, found, request, shown) if request.verify else facts


def _step(network: Checkpointable, found: ModelFile, request: Request, place: Place) -> TrainingStep:
    loss = found.loss or default_loss
    return TrainingStep(network, found.sample, loss, found.optimizer, request.fresh_grads, place.autocast)


def _stored(found: ModelFile, network: Checkpointable, request: Request) -> Facts:
    """The facts before anything is planned: those of storing everything, without a limit."""
    assert network.budget is not None
    assert network.inspection_values is not None
    stored = store_all(network.budget.chain)
    return Facts(
        title=found.name,
        device=str(network.device),
        mem_limit=network.budget.peak_bytes(stored),
        budget=network.budget,
        measurement=network.inspection_values,
        sequence=stored,
        arguments=arguments_in_python(found, network, request),
        limited=request.limited,
        compiled=network.compiled if request.compile else None,
    )


def _sweep(facts: Facts, network: Checkpointable, request: Request, shown: Activities) -> Facts:
    others = leanest_of_each(facts, network.model, request.slots, shown.doing("sweeping"))
    with watched(shown.doing("sweeping")):
        return replace(facts, sweep=sweep_of(facts, request.slots, others, request.overhead))


def _plan(facts: Facts, network: Checkpointable, limit: int | None, request: Request) -> Facts:
    """With the plan for `limit`, or else for the time that is allowed. Failure if no plan fits."""
    if request.overhead is not None:
        # The sweep has solved for every limit already, so its sequence is taken over and not solved for again.
        assert facts.sweep is not None
        point = facts.sweep.least_for(request.overhead)
        network.mem_limit, network.sequence = point.mem_limit, point.sequence
        return replace(facts, mem_limit=point.mem_limit, sequence=point.sequence)
    assert limit is not None
    try:
        sequence = network.compute_sequence()
    except InfeasibleError as error:
        if not request.quiet:
            # What each stage takes says where to cut. Not on stdout, where a script expects a plan.
            console(stderr=True).print(StageTable(facts, costs_alone=True), "", sep="\n")
        raise Failure(str(error), INFEASIBLE) from error
    # Which stages run compiled is decided for a limit, and costs follow from that.
    assert network.budget is not None
    assert network.inspection_values is not None
    found = replace(facts, budget=network.budget, measurement=network.inspection_values)
    compiled = network.compiled if request.compile else None
    return replace(found, mem_limit=limit, sequence=sequence, compiled=compiled)


def _reserve(facts: Facts, network: Checkpointable, found: ModelFile, request: Request, place: Place) -> Facts:
    """With what the allocator reserves for the plan; where nobody has set a limit, one that leaves room for it."""
    keep_limit = request.mem_limit is not None or request.overhead is not None
    reserved = place.reserve(_step(network, found, request, place), keep_limit=keep_limit)
    if reserved is None:
        return facts
    assert network.budget is not None
    assert network.sequence is not None
    limit = limit_bytes(network.mem_limit, network.device)
    return replace(facts, reserved=reserved, mem_limit=limit, budget=network.budget, sequence=network.sequence)


def _verify(facts: Facts, network: Checkpointable, found: ModelFile, request: Request, shown: Activities) -> Facts:
    """With what real steps showed: of the plan, and of every other strategy that fits."""
    with explained(found.file):
        results = verify(
            network,
            found.sample,
            loss=found.loss,
            optimizer=found.optimizer,
            others=[each.sequence for each in facts.compared[1:] if each.fits],
            operations=request.trace_file is not None,
            progress=shown.doing("verifying:"),
        )
    return replace(facts, verified=results[0], compared=with_verified(facts.compared, results))
