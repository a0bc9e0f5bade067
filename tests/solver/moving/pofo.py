"""A naive twin in the manner of POFO: Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and
Offloading for Training DNNs", NeurIPS 2021.

It goes along the chain once, and at every stage both through the forward and, backwards in time, through the backward:
seen so, a copy back is a copy out. The state is what stays (`kept`), and the bytes that have yet to leave: `out` after
the forwards so far, `back` seen from the end of the step. While a stage computes, the link takes its part of them.
Where memory is short, everything waits for the link. Bytes leave one by one here, not tensor by tensor: no timetable of
copies does better with the same stages moved. A segment that is computed again does so with `back` as it is when the
segment is over. Checkpoints are not moved.
"""

from __future__ import annotations

import math
from functools import cache

from rotor_solver import Chain
from rotor_solver.moving import Link


def pofo_optimum(chain: Chain, limit: int, link: Link) -> float:
    """Seconds; infinite if nothing fits. For chains of `tiny_chains`: no gradients, nothing released or held."""
    length, sizes, stages = len(chain), chain.activation, chain.stages
    out_rate, in_rate = link.out_bytes_per_second, link.in_bytes_per_second

    @cache
    def again(i: int, last: int, memory: float) -> float:
        """The published recurrence for [i, last] after the loss, where nothing moves."""
        times = [math.inf]
        for option in stages[i].options:
            during = max(
                sizes[last + 1] + option.kept + option.forward_temp,
                sizes[i] + sizes[i + 1] + option.kept + option.backward_temp,
            )
            if during <= memory:
                rest = again(i + 1, last, memory - option.kept) if i < last else 0.0
                times.append(option.forward_time + option.backward_time + rest)
        for j in range(i + 1, last + 1):
            if sizes[last + 1] + without_graph(i, j) <= memory:
                forward = sum(chain.nograd_time[i:j])
                times.append(forward + again(j, last, memory - sizes[j]) + again(i, j - 1, memory))
        return min(times)

    def without_graph(i: int, j: int) -> int:
        return max((sizes[k] if k > i else 0) + sizes[k + 1] + chain.nograd_temp[k] for k in range(i, j))

    def step(seconds: float, needed: float, left: float, rate: float) -> tuple[float, float]:
        """Seconds with what has to be waited for, and what is left of `left` bytes, to compute in `needed` bytes."""
        room = limit - needed
        if room < 0:
            return math.inf, 0.0
        return seconds + max(0.0, left - room) / rate, max(0.0, min(left, room) - seconds * rate)

    @cache
    def best(i: int, kept: int, out: float, back: float) -> float:
        if i == length:
            seconds, out = step(chain.loss_time, kept + sizes[length] + chain.loss_temp, out, out_rate)
            return seconds + out / out_rate + back / in_rate
        times = [math.inf]
        for option in stages[i].options:
            forward, left = step(option.forward_time, kept + option.kept + option.forward_temp, out, out_rate)
            needed = kept + option.kept + sizes[i] + sizes[i + 1] + option.backward_temp
            backward, rest = step(option.backward_time, needed, back, in_rate)
            if math.isfinite(forward + backward):
                later = best(i + 1, kept + option.saved, left + option.moved, rest + option.moved)
                times.append(forward + backward + later)
        for j in range(i + 1, length + 1):
            forward, left = step(sum(chain.nograd_time[i:j]), kept + without_graph(i, j), out, out_rate)
            for waited in {back, *map(float, range(math.ceil(back)))}:  # seen from the end, the link has its turn first
                backward = (back - waited) / in_rate + again(i, j - 1, limit - kept - waited)
                if math.isfinite(forward + backward):
                    rest = max(0.0, waited - again(i, j - 1, limit - kept - waited) * in_rate)
                    times.append(forward + backward + best(j, kept + sizes[j], left, rest))
        return min(times)

    return best(0, sizes[0], 0.0, 0.0)
