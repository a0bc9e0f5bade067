"""Chains of groups of stages: smaller problems whose sequences are sequences of the chain itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rotor_solver.chain import Chain
from rotor_solver.operations import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation
from rotor_solver.sequence import Sequence
from rotor_solver.stage import Option, Stage


def coarse_chain(chain: Chain, groups: list[range]) -> Chain:
    """Every group of consecutive stages as one stage that costs at least as much memory, and as much time.

    So whatever fits for the coarse chain fits for the chain itself. Each stage is run by its fastest option.
    """
    # Nothing is released early in the coarse chain: that only makes its stages cost more.
    activation = chain.activation
    held = activation[-1] if chain.output_held else 0
    stages = [
        _merged(chain.stages[group.start : group.stop], activation[group.start], held * (group.stop == len(chain)))
        for group in groups
    ]
    return Chain(tuple(stages), chain.input_bytes, chain.loss_time, chain.loss_temp, chain.output_held)


def fine_sequence(chain: Chain, groups: list[range], coarse: Iterable[Operation]) -> Sequence:
    """The sequence for the chain itself that does what `coarse`, a sequence for `coarse_chain`, does by groups."""
    return Sequence(each for operation in coarse for each in _expanded(chain, groups, operation))


def _expanded(chain: Chain, groups: list[range], operation: Operation) -> Iterator[Operation]:
    if isinstance(operation, Loss):
        yield operation
        return
    group = groups[operation.stage]
    match operation:
        case ForwardEnable():
            yield from (ForwardEnable(i, chain.stages[i].fastest_option) for i in group)
        case ForwardCheck():
            yield ForwardCheck(group.start)
            yield from map(ForwardNograd, group[1:])
        case ForwardNograd():
            yield from map(ForwardNograd, group)
        case Backward():
            yield from map(Backward, reversed(group))


def _merged(stages: tuple[Stage, ...], incoming: int, held: int) -> Stage:
    """A group as one stage. `held` is what the caller keeps of the output once the last backward is through."""
    options = [stage.options[stage.fastest_option] for stage in stages]
    inputs = [incoming, *(stage.activation for stage in stages)]
    outgoing = inputs[-1]
    saved, forward_most, backward_most, check_most = 0, 0, 0, 0
    later = sum(stage.gradient for stage in stages)
    for k, (stage, option) in enumerate(zip(stages, options, strict=True)):
        saved += option.kept
        later -= stage.gradient
        forward_most = max(forward_most, saved + option.forward_temp)
        temp = max(option.backward_temp, option.backward_temp_of_replay)
        backward_most = max(
            backward_most, saved + inputs[k] + inputs[k + 1] + temp + later + held * (stage is not stages[-1])
        )
        check_most = max(check_most, (inputs[k] if k else 0) + stage.activation + stage.temp_without_graph)
    option = Option(
        forward_time=sum(option.forward_time for option in options),
        backward_time=sum(option.backward_time for option in options),
        saved=saved,
        forward_temp=forward_most - saved,
        backward_temp=max(-incoming, backward_most - saved - incoming - outgoing),
    )
    return Stage(
        activation=outgoing,
        options=(option,),
        nograd_time=sum(stage.seconds_without_graph for stage in stages),
        nograd_temp=max(0, check_most - outgoing),
        gradient=sum(stage.gradient for stage in stages),
        skipped_output_time=stages[-1].skipped_output_time,
    )
