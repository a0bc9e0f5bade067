"""A chain in which every checkpoint that may be rounded is rounded, and less memory is needed than in any real plan.

Let r_i be the rounded bytes of a_i, and d_i = |a_i| - r_i. A real plan has a_i in r_i bytes at least while it waits as
a checkpoint, and in |a_i| while a stage makes or reads it. In the relaxed chain a_i takes r_i, and d_i is added where
every plan has it whole, whichever way it goes:

* δ_i is never rounded. `B_i` leaves d_i more beside it and ends d_{i+1}, as if these were gradients of parameters.
* A run that makes a_{i+1} has it whole: d_{i+1} more while it runs without a graph. ā_{i+1} has it whole anyway.
* `B_i` makes δ_i whole: d_i more while it runs.
* `Fe_i` from an a_i that stands alone leaves it whole, to the end of `B_i`: the input grows by d_i (`input_grown`),
  less what is freed of it then. If a_i lies in ā_i, it is whole already.

What is left out: a_i is whole while `CF_i` reads it, and while it is rounded or brought back, which takes time, too. So
each real plan has a twin here that is no slower, and never takes more memory: the twin's bound holds for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotor_solver.chain import Chain
from rotor_solver.stage import Option, Stage


def may_round(chain: Chain) -> bool:
    """Whether any checkpoint can be kept in fewer bits."""
    return any(border.less for border in _borders(chain))


def relaxed_chain(chain: Chain) -> Chain:
    """The chain of this module. Its sequences are sequences of `chain`, with checkpoints that may be rounded."""
    borders = _borders(chain)
    stages = tuple(_relaxed(chain, number, *borders[number : number + 2]) for number in range(len(chain)))
    return replace(chain, stages=stages)


@dataclass(frozen=True, slots=True)
class _Border:
    """An a_i that takes `less` bytes. What is freed of it once stage i has run with a graph is what it is in `chain`.

    Alone it is `alone`, which is below zero where a_i grows. Inside of ā_i, it is what both stages do without, of which
    `input_released` and `output_released` are as much as a relaxed a_i has; the rest, `lost`, ā_i lacks from the start.
    """

    less: int
    input_released: int
    output_released: int
    alone: int
    lost: int = 0


def _borders(chain: Chain) -> list[_Border]:
    """Of a_0 … a_L. Only inputs of stages that others make are checkpoints."""
    found = []
    for index, whole in enumerate(chain.activation):
        before = chain.stages[index - 1] if index else None
        after = chain.stages[index] if index < len(chain) else None
        given = 0 if before is None else before.output_released
        taken = 0 if after is None else after.input_released
        form = None if before is None or after is None else before.rounded
        left = whole if form is None else form.nbytes
        if left == whole:
            found.append(_Border(0, taken, given, taken))
            continue
        inside = max(0, taken + given - whole)
        released = min(given, left)
        together = min(inside, left)
        found.append(
            _Border(
                whole - left,
                left - released + together if together else 0,
                released,
                taken - (whole - left),
                inside - together,
            )
        )
    return found


def _relaxed(chain: Chain, number: int, incoming: _Border, outgoing: _Border) -> Stage:
    """The stage between two values."""
    stage = chain.stages[number]
    alone = incoming.alone if _most_is_during_backward(chain, number) else max(0, incoming.alone)
    return replace(
        stage,
        activation=stage.activation - outgoing.less,
        options=tuple(_relaxed_option(each, incoming.less, outgoing.lost) for each in stage.options),
        nograd_time=stage.seconds_without_graph,
        nograd_temp=stage.temp_without_graph + outgoing.less,
        gradient=stage.gradient + incoming.less - outgoing.less,
        input_released=incoming.input_released,
        output_released=outgoing.output_released,
        rounded=None,
        input_grown=incoming.input_released - alone,
    )


def _relaxed_option(option: Option, less: int, lost: int) -> Option:
    """An option whose input takes so much `less`, and whose ā lacks what is `lost`, which is there while it runs."""
    replay = option.replay_temp
    return replace(
        option,
        saved=option.saved - lost,
        forward_temp=option.forward_temp + lost,
        backward_temp=option.backward_temp + less + lost,
        replay_temp=None if replay is None else replay + less + lost,
    )


def _most_is_during_backward(chain: Chain, number: int) -> bool:
    """Whether `B_i` takes no less while it runs than when it is done: the input, which is gone then, counts as grown
    in both.
    """
    stage = chain.stages[number]
    around = chain.activation[number] + stage.activation - stage.gradient
    if chain.output_held and number == len(chain) - 1:
        around -= stage.activation
    return all(
        around + each.kept + min(each.backward_temp, each.backward_temp_of_replay) >= 0 for each in stage.options
    )
