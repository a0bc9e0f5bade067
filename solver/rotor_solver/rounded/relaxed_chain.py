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

from dataclasses import replace

from rotor_solver.chain import Chain
from rotor_solver.stage import Option, Stage


def may_round(chain: Chain) -> bool:
    """Whether any checkpoint can be kept in fewer bits."""
    return any(_less(chain))


def relaxed_chain(chain: Chain) -> Chain:
    """The chain of this module. Its sequences are sequences of `chain`, with checkpoints that may be rounded."""
    less = _less(chain)
    stages = tuple(_relaxed(chain, number, less[number], less[number + 1]) for number in range(len(chain)))
    return replace(chain, stages=stages)


def _less(chain: Chain) -> list[int]:
    """d_0 … d_L: by how many bytes each a_i gets smaller. Only inputs of stages that others make are checkpoints."""
    inner = [0 if each.rounded is None else each.activation - each.rounded.nbytes for each in chain.stages[:-1]]
    return [0, *inner, 0] if len(chain) else [0]


def _relaxed(chain: Chain, number: int, incoming: int, outgoing: int) -> Stage:
    """The stage, where its input takes `incoming` bytes less, and its output `outgoing`."""
    stage = chain.stages[number]
    inputs, outputs = chain.activation[number] - incoming, stage.activation - outgoing
    released = min(stage.output_released, outputs)
    # What is freed of the output together with ā: no more than the output has, so the rest is missing from the start.
    lost = stage.output_released - released
    input_released = min(stage.input_released, inputs)
    grown = incoming - (stage.input_released - input_released)
    return replace(
        stage,
        activation=outputs,
        options=tuple(_relaxed_option(each, incoming, lost) for each in stage.options),
        nograd_time=stage.seconds_without_graph,
        nograd_temp=stage.temp_without_graph + outgoing,
        gradient=stage.gradient + incoming - outgoing,
        input_released=input_released,
        output_released=released,
        rounded=None,
        input_grown=grown if _most_is_during_backward(chain, number) else 0,
    )


def _relaxed_option(option: Option, incoming: int, lost: int) -> Option:
    replay = option.replay_temp
    return replace(
        option,
        saved=option.saved - lost,
        forward_temp=option.forward_temp + lost,
        backward_temp=option.backward_temp + incoming + lost,
        replay_temp=None if replay is None else replay + incoming + lost,
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
