"""The fastest sequence with several microbatches in flight: the recurrence, as plain as it can be. Begin to read here.

k microbatches are in flight. One is in progress; each of the others holds what is kept from forward to backward. With
at most K bytes kept, a_0 included, the one in progress has M = limit - (k - 1) · K bytes. K is tried from least to
most. For each, a recurrence like that of the persistent program (`persistent/recurrence.py`) has two kinds of
intervals:

    [i, L]         with the loss. What is kept before a_i's own stages run is kept to the loss, so `kept`, the bytes of
                   K that are left, also says what is left of M: kept + M - K. Each choice takes from both.
    [i, l], l < L  after the loss. Nothing is kept any more: they may use all of M that is free, as ever.

    Fe_i                       then [i+1, L] with |ā_{i+1}| less
    CF_i, Fn_{i+1} … Fn_{j-1}  then [j, L] with |a_j| less, then [i, j-1] from a_i again: a second kind, if j - 1 < L

`kernels` computes the same for all numbers of bytes at once, with memory in slots.
"""

from __future__ import annotations

import math
from functools import cache

from rotor_solver.arrays.costs import costs_of
from rotor_solver.chain import Chain
from rotor_solver.extremes import store_all
from rotor_solver.simulate import simulate


def optimum(chain: Chain, mem_limit: int, count: int) -> float:
    """Seconds of the fastest memory-persistent sequence with (count - 1) · kept + peak ≤ mem_limit bytes, a_0 counted;
    infinite if there is none. It tries every number of bytes: for a few stages, and small sizes.
    """
    most = mem_limit // count
    tried = (_longer(chain, kept, mem_limit - (count - 1) * kept) for kept in range(chain.input_bytes, most + 1))
    return simulate(chain, store_all(chain)).makespan + min(tried, default=math.inf)


def _longer(chain: Chain, most_kept: int, mem_limit: int) -> float:
    """Seconds beyond storing everything, with `most_kept` bytes at the loss and `mem_limit` at most."""
    costs, length, beyond = costs_of(chain), len(chain), mem_limit - most_kept

    @cache
    def longer(i: int, last: int, free: int, inside: int) -> float:
        """`free` is the memory for [i, last]; if that ends with the loss, what may still be kept.

        It may be less than nothing before the loss, if a later stage frees more of its input than it saves.
        """
        if i > last:
            return 0.0
        m = free + beyond if last == length else free
        if i == length:
            return 0.0 if free >= 0 and m >= costs.loss_need else math.inf
        best, made_again = math.inf, 1 if last < length else 0
        for k in range(costs.first[i], costs.first[i + 1]):
            forward_need = costs.base[last] + costs.forward_need[k]
            backward_need = costs.backward_need[made_again, k] - costs.released[inside, i]
            if m >= max(forward_need, backward_need):
                best = min(best, costs.extra[k] + longer(i + 1, last, free - costs.taken[inside, k], 1))
        for j in range(i + 1, last + 1):
            if m >= costs.base[last] + costs.check_need[i, j]:
                parts = longer(j, last, free - costs.activation[j], 0) + longer(i, j - 1, m, inside)
                best = min(best, costs.split[j] - costs.run[i] + parts)
        return float(best)

    return longer(0, length, most_kept - chain.input_bytes, 0)
