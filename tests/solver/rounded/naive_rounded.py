"""A slow twin: all memory-persistent sequences whose checkpoints may be rounded, in bytes of all that is in memory."""

from __future__ import annotations

import math
from enum import Enum
from functools import cache

from rotor_solver import Chain


class Where(Enum):
    """How a_i is there when stages from i on are worked on."""

    WHOLE = "alone"
    ROUNDED = "alone, in fewer bits"
    INSIDE = "inside of ā_i"


def naive_rounded_optimum(chain: Chain, limit: int) -> float:
    """The least makespan within `limit` bytes; infinite where there is no such sequence."""
    length, stages, sizes, released = len(chain), chain.stages, chain.activation, chain.released
    caller = sizes[length] if chain.output_held else 0
    forms = [None, *(stage.rounded for stage in stages[:-1]), None]

    def gradients(first: int, last: int) -> int:
        return sum(stage.gradient for stage in stages[first : last + 1])

    def turned(used: int, first: int, last: int) -> int:
        """What is in memory once stages last … first have gone backward, where their inputs stay: δ for δ."""
        before = sizes[last + 1] if last < length else 0
        return used - before + sizes[first] + gradients(first, last)

    @cache
    def best(i: int, last: int, used: int, where: Where) -> float:
        """Seconds from here, with `used` bytes in memory, to where stages last … i are done."""
        if i == length:
            return chain.loss_time if used + sizes[length] + chain.loss_temp <= limit else math.inf
        start, form = 0.0, forms[i]
        if where is Where.ROUNDED:
            assert form is not None
            if used + sizes[i] + form.restore_temp > limit:
                return math.inf
            used, start = used + sizes[i] - form.nbytes, form.restore_seconds
        return start + min(stored(i, last, used, where is Where.INSIDE), kept(i, last, used, where is Where.INSIDE))

    def stored(i: int, last: int, used: int, inside: bool) -> float:
        """Fe_i … B_i."""
        times = [math.inf]
        for option in stages[i].options:
            if used + option.saved + option.forward_temp > limit:
                continue
            freed = released[i][inside]
            held, rest = used + option.saved - freed, 0.0
            again = last < length
            if last > i:
                rest = best(i + 1, last, held, Where.INSIDE)
                held = turned(held, i + 1, last) + (caller if last == length and i + 1 < length else 0)
            temp = option.backward_temp_of_replay if again else option.backward_temp
            after = held - option.saved - sizes[i + 1] + sizes[i] + stages[i].gradient
            after -= 0 if inside else sizes[i] - freed
            after += caller if last == length and i + 1 == length else 0
            if max(held + sizes[i] + temp, after) <= limit:
                skipped = stages[i].skipped_output_time if again and i == last else 0.0
                times.append(option.forward_time - skipped + option.backward_time + rest)
        return min(times)

    def kept(i: int, last: int, used: int, inside: bool) -> float:
        """CF_i … Fn_{j-1}, stages from j on, and from a_i again."""
        times, form = [math.inf], forms[i]
        if used + sizes[i + 1] + stages[i].temp_without_graph > limit:
            return math.inf
        forward = stages[i].seconds_without_graph
        ways = [(used, forward, Where.INSIDE if inside else Where.WHOLE)]
        if form is not None and not inside and used + sizes[i + 1] + form.nbytes + form.temp <= limit:
            ways.append((used - sizes[i] + form.nbytes, forward + form.seconds, Where.ROUNDED))
        for held, begun, where in ways:
            seconds = begun
            for j in range(i + 1, last + 1):
                if j > i + 1:
                    if held + sizes[j - 1] + sizes[j] + stages[j - 1].temp_without_graph > limit:
                        break
                    seconds += stages[j - 1].seconds_without_graph
                later = best(j, last, held + sizes[j], Where.WHOLE)
                back = turned(held, j, last) + (caller if last == length else 0)
                if math.isfinite(later):
                    times.append(seconds + later + best(i, j - 1, back, where))
        return min(times)

    return best(0, length, chain.input_bytes, Where.WHOLE) if chain.input_bytes <= limit else math.inf
