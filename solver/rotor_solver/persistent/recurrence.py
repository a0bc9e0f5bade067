"""The recurrence of the persistent program, as plain as it can be: begin to read here.

A sequence is memory-persistent if a checkpoint is only dropped at the backward that uses it. Such sequences are trees
over intervals of stages (Beaumont et al., "Optimal checkpointing for heterogeneous chains", HAL hal-02352969; the
memory conditions are our own, see docs/solver.md). [i, l] stands for a problem: do the backwards of stages l, …, i,
with a_i and δ_{l+1} in memory, in m bytes, a_i not counted. The loss is stage L. There are two ways to begin:

    Fe_i                       then [i+1, l] with what is left beside ā_{i+1}, then B_i
    CF_i, Fn_{i+1} … Fn_{j-1}  then [j, l] beside the checkpoint a_j, then, once that is gone, [i, j-1] from a_i again

`optimum` tries both for every interval, and remembers every number of bytes that comes up. That is far too slow for
more than a dozen stages. `kernels` computes the same for all m at once, with memory in slots; `program` decides how
fine they are.
"""

from __future__ import annotations

import math
from functools import cache

from rotor_solver.arrays.costs import costs_of
from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.simulate import simulate


def optimum(chain: Chain, mem_limit: int) -> float:
    """Seconds of the fastest memory-persistent sequence within `mem_limit` bytes, a_0 counted; infinite if none fits.

    What is minimised is the time beyond that of storing everything, the same for every sequence. Every sequence runs
    each stage once with a graph and once backward; what differs are the options, and the forwards before checkpoints.
    """
    costs, length = costs_of(chain), len(chain)

    @cache
    def longer(i: int, last: int, m: int, inside: int) -> float:
        """`inside` is 1 where a_i lies in the ā_i of the stage before, 0 where it stands alone."""
        if i > last:
            return 0.0
        if i == length:
            return 0.0 if m >= costs.loss_need else math.inf
        best, made_again = math.inf, 1 if last < length else 0  # whether Fe_i runs after the loss
        for k in range(costs.first[i], costs.first[i + 1]):  # Fe_i by each of its options
            forward_need = costs.base[last] + costs.forward_need[k]
            backward_need = costs.backward_need[made_again, k] - costs.released[inside, i]
            if m >= max(forward_need, backward_need):
                best = min(best, costs.extra[k] + longer(i + 1, last, m - costs.taken[inside, k], 1))
        for j in range(i + 1, last + 1):  # CF_i, with a checkpoint at a_j
            if m >= costs.base[last] + costs.check_need[i, j]:
                parts = longer(j, last, m - costs.activation[j], 0) + longer(i, j - 1, m, inside)
                best = min(best, costs.split[j] - costs.run[i] + parts)
        return float(best)

    return simulate(chain, store_all(chain)).makespan + longer(0, length, mem_limit - chain.input_bytes, 0)
