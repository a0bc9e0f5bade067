"""Slow twins of the solver: the recurrence as a memoised recursion in bytes, and a search over all schedules."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, product
from types import SimpleNamespace

from rotor_solver import Backward, Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Option, Sequence

NAMES = "activation saved gradient forward_time backward_time nograd_time forward_temp backward_temp nograd_temp"
NAMES += " released skipped_output_time loss_time loss_temp"


def columns_of(chain: Chain) -> SimpleNamespace:
    """The costs of a chain by stage, under the chain's own names, which lists them anew whenever it is asked."""
    columns = SimpleNamespace(length=len(chain), **{name: getattr(chain, name) for name in NAMES.split()})
    columns.gradients_from = [sum(columns.gradient[i:]) for i in range(len(chain) + 1)]
    columns.held = chain.activation[-1] if chain.output_held else 0
    return columns


def beside(columns: SimpleNamespace, last: int) -> int:
    """Bytes in memory beside what [i, last] makes, while its stages run forward."""
    if last == columns.length:
        return 0
    return columns.activation[last + 1] + columns.gradients_from[last + 1] + columns.held


def with_graph(columns: SimpleNamespace, i: int, last: int, option: Option, inside: bool) -> tuple[int, float]:
    """The bytes that Fe_i and B_i need in [i, last], a_i not counted, and their seconds."""
    sizes, lost, freed = columns.activation, last < columns.length, columns.released[i][inside]
    temp = option.backward_temp_of_replay if lost else option.backward_temp
    during = sizes[i] + sizes[i + 1] + columns.gradients_from[i + 1] + option.saved + temp
    during += columns.held * (lost or i < columns.length - 1)
    after = columns.gradients_from[i] + columns.held
    need = max(beside(columns, last) + option.saved + option.forward_temp, max(during, after) - freed)
    skipped = columns.skipped_output_time[i] if lost and i == last else 0.0
    return need, option.forward_time - skipped + option.backward_time


def naive_optimum(chain: Chain, limit: int, attached: bool | None = None) -> float:
    """The least makespan of a memory-persistent sequence within `limit` bytes; infinite where there is none.

    If `attached` is given, that of `GriewankHeterogeneous`, which stores a stage in the fastest way alone: `attached`,
    so that whatever follows a checkpoint begins with a graph, and otherwise only right before its backward.
    """
    length, columns, sizes = len(chain), columns_of(chain), chain.activation

    def ways(i: int, last: int) -> tuple[Option, ...]:
        stage = chain.stages[i]
        if attached is None:
            return stage.options
        stored = attached or i == last or (i, last) == (length - 1, length)
        return (stage.options[stage.fastest_option],) if stored else ()

    @cache
    def best(i: int, last: int, memory: int, inside: bool, enable: bool = False) -> float:
        """`inside` says that a_i lies in an ā_i, and not alone; `enable` that [i, last] has to begin with Fe_i."""
        if i == length:
            return chain.loss_time if memory >= sizes[length] + chain.loss_temp else math.inf
        times = [math.inf]
        for option in ways(i, last):
            need, seconds = with_graph(columns, i, last, option, inside)
            if memory >= need:
                rest = memory + columns.released[i][inside] - option.saved
                times.append(seconds + (best(i + 1, last, rest, True) if i < last else 0.0))
        forward, most = 0.0, 0
        for j in range(i + 1, last + 1) if not enable else ():
            forward += columns.nograd_time[j - 1]
            most = max(most, (sizes[j - 1] if j - 1 > i else 0) + sizes[j] + columns.nograd_temp[j - 1])
            if memory >= beside(columns, last) + most:
                rest = best(j, last, memory - sizes[j], False, bool(attached) and j < length)
                times.append(forward + rest + best(i, j - 1, memory, inside))
        return min(times)

    return best(0, length, limit - sizes[0], False)


@dataclass(frozen=True)
class State:
    """What is in memory: inputs that stand alone, those of them that are kept for later, saved sets, and the gradient
    of `delta` (before the loss: of nothing). `gone` are inputs that were freed, alone or inside a saved set."""

    plain: frozenset[int] = frozenset({0})
    kept: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    gone: frozenset[tuple[int, bool]] = frozenset()
    delta: int = -1
    lost: bool = False

    def readable(self) -> frozenset[int]:
        alone = {i for i in self.plain if (i, False) not in self.gone}
        return frozenset(alone | {i for i in self.saved if (i, True) not in self.gone})

    def without(self, index: int, inside: bool) -> State:
        """This state without one of the places in which a_index is."""
        state = replace(self, gone=self.gone - {(index, inside)})
        if inside:
            return replace(state, saved=self.saved - {index})
        return replace(state, plain=self.plain - {index}, kept=self.kept - {index})

    def held(self, chain: SimpleNamespace) -> int:
        sizes = chain.activation
        return (
            sum(sizes[i] for i in self.plain)
            + sum(chain.saved[i - 1] for i in self.saved)
            - sum(chain.released[i][inside] for i, inside in self.gone)
            + (sizes[self.delta] if self.lost else 0)
        )


def exhaustive_optimum(chain: Chain, limit: int, *, persistent: bool) -> float:
    """The least makespan of all valid sequences of operations, in any order.

    If `persistent`, only of those that drop an input that was kept, or that a saved set belongs to, at its backward,
    and that use every other one in the next operation.
    For chains with one option per stage, without parameter gradients, whose output nobody holds.
    """
    if chain.input_bytes > limit:
        return math.inf
    order, columns = count(), columns_of(chain)
    start = State()
    known, queue = {start: 0.0}, [(0.0, next(order), start)]
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state.delta == 0:
            return seconds
        if seconds > known[state]:
            continue
        for more, during, following in _moves(columns, state, persistent):
            if during <= limit and seconds + more < known.get(following, math.inf):
                known[following] = seconds + more
                heapq.heappush(queue, (seconds + more, next(order), following))
    return math.inf


def _moves(chain: SimpleNamespace, state: State, persistent: bool) -> Iterator[tuple[float, int, State]]:
    """What can be done next: seconds, bytes during it, and the state after it."""
    sizes, length, held = chain.activation, chain.length, state.held(chain)
    for i in state.readable() - {length}:
        if persistent and state.plain - state.kept - {i}:
            continue  # an input that was made is used next, or kept to its backward
        keep = state.kept | ({i} & state.plain) if persistent else state.kept
        if i + 1 not in state.saved:
            during = held + chain.saved[i] + chain.forward_temp[i]
            enabled = replace(state, kept=keep, saved=state.saved | {i + 1})
            yield chain.forward_time[i], during, enabled
            for freed in (enabled, *_freed(chain, enabled, i)):  # right before its backward: nobody reads the output
                for seconds, most, after in _backward(chain, freed) if freed.delta == i + 1 else ():
                    skipped = chain.forward_time[i] - chain.skipped_output_time[i]
                    yield skipped + seconds, max(during, most), after
        made = replace(state.without(i + 1, inside=False), kept=keep)
        made = replace(made, plain=made.plain | {i + 1})
        during = held + sizes[i + 1] + chain.nograd_temp[i]
        yield chain.nograd_time[i], during, made
        if i not in state.kept and i in state.plain:
            yield chain.nograd_time[i], during, replace(made.without(i, inside=False), kept=state.kept - {i})
        for freed in _freed(chain, state, i):
            yield 0.0, held, freed
    if not state.lost and length in state.readable():
        after = replace(state.without(length, inside=False), delta=length, lost=True)
        yield chain.loss_time, held + sizes[length] + chain.loss_temp, after
    yield from _backward(chain, state)


def _freed(chain: SimpleNamespace, state: State, i: int) -> Iterator[State]:
    """Without a_i in one of its places: nobody will read it any more."""
    for inside in (False, True):
        place = state.saved if inside else state.plain
        if i in place and i + 1 in state.saved and chain.released[i][inside]:
            yield replace(state, gone=state.gone | {(i, inside)})


def _backward(chain: SimpleNamespace, state: State) -> Iterator[tuple[float, int, State]]:
    sizes, held = chain.activation, state.held(chain)
    i = state.delta - 1
    if state.lost and state.delta in state.saved and i in state.plain | state.saved:
        after = replace(state.without(i, inside=False).without(state.delta, inside=True), delta=i)
        # Scratch is counted from all of ā on: what is gone of it already makes no difference.
        full = held + (chain.released[i + 1][True] if (i + 1, True) in state.gone else 0)
        yield chain.backward_time[i], max(full + sizes[i] + chain.backward_temp[i], after.held(chain)), after


def all_sequences(chain: Chain) -> Iterator[Sequence]:
    """Every memory-persistent sequence."""
    length = len(chain)

    def parts(i: int, last: int) -> Iterator[tuple[Operation, ...]]:
        if i == length:
            yield (Loss(),)
            return
        for option in range(len(chain.stages[i].options)):
            for rest in parts(i + 1, last) if i < last else [()]:
                yield ForwardEnable(i, option), *rest, Backward(i)
        for j in range(i + 1, last + 1):
            for right, left in product(parts(j, last), parts(i, j - 1)):
                yield ForwardCheck(i), *map(ForwardNograd, range(i + 1, j)), *right, *left

    return map(Sequence, parts(0, length))
