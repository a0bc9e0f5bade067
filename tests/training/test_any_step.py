"""Whatever a user writes around the forwards of a step: as plain training, and inside the limit once it is known."""

import gc
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import soak
from rotor_profiling import memory_meter
from rotor_py import Checkpointable, InfeasibleError, UnsupportedModelError
from rotor_py.errors import StageChangedError
from tests.checkpointable.steps import CPU, Tower, square

LARGEST = 256
WIDTH = 64
MOST = 3
"""Forwards in flight at once."""
UNSEEN = ("attribute", "dropout", "global", "context", "counter", "function mode")
"""Changes that a chain is not planned anew for."""
CHANGES = (*UNSEEN, "hook", "hook on all", "frozen", "evaluated")
REFUSED = (InfeasibleError, StageChangedError, UnsupportedModelError)
OWN = 16_384
"""Bytes that the test itself makes: copies of the random state, and scalars."""


class _StopError(Exception):
    """Raised on purpose."""


SCALE = 1.0
GATE: ContextVar[float] = ContextVar("gate", default=1.0)


class Scaled(TorchFunctionMode):
    """Multiplies what activations return."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * self.factor if func in (nn.functional.gelu, torch.tanh) else made


class Breaking(nn.Module):
    """Raises when it is told to. What it multiplies by is in an attribute, a global and a context variable."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.5

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise _StopError
        return value * (self.factor * SCALE * GATE.get())


def chain() -> nn.Sequential:
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)
    ]
    return nn.Sequential(*layers[:2], Breaking(), *layers[2:])


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


class World:
    """A network, what is in flight through it, and a log of all numbers that came out."""

    def __init__(self, network: nn.Module, *, gradient: bool) -> None:
        self.network, self.gradient = network, gradient
        self.flying: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.log: list[bytes] = []
        self.undo: dict[str, Callable[[], object]] = {}

    def write(self, *tensors: torch.Tensor | None) -> None:
        self.log += [b"" if each is None else each.detach().numpy().tobytes() for each in tensors]

    def forward(self, size: int, seed: int) -> None:
        given = rows(size, seed).requires_grad_(self.gradient)
        self.flying.append((given, self.network(given)))
        self.write(self.flying[-1][1])

    def backward(self, at: int, times: int) -> None:
        given, output = self.flying.pop(at)
        for number in range(times):
            square(output).backward(retain_graph=number < times - 1)
        self.write(given.grad)

    def evaluate_backward(self) -> None:
        self.network.eval()
        self.backward(len(self.flying) - 1, 1)
        self.network.train()

    def backward_of_a_sum(self) -> None:
        sum(square(output) for _, output in self.flying).backward()
        self.write(*(given.grad for given, _ in self.flying))
        self.flying.clear()

    def drop(self, at: int) -> None:
        self.flying.pop(at)

    def look(self, size: int, seed: int, training: bool) -> None:
        self.network.train(training)
        with torch.no_grad():
            self.write(self.network(rows(size, seed)))
        self.network.train()

    def break_forward(self, size: int) -> None:
        if any(isinstance(each, Breaking) for each in self.network.modules()):  # else it would be in flight
            Breaking.fails = True
            try:
                with suppress(_StopError):
                    self.network(rows(size, 0).requires_grad_(self.gradient))
            finally:
                Breaking.fails = False

    def break_backward(self, at: int) -> None:
        def stop(gradient: torch.Tensor) -> None:
            raise _StopError

        _, output = self.flying.pop(at)
        output.register_hook(stop)
        with suppress(_StopError):
            square(output).backward()

    def write_before_backward(self, at: int, which: int) -> None:
        """Write to a parameter: plain training raises if its backward reads it, and is right otherwise."""
        parameters = list(self.network.parameters())
        parameter = parameters[which % len(parameters)]
        before = parameter.detach().clone()
        try:
            parameter.data.add_(0.5) if which % 2 else parameter.detach().add_(0.5)
            self.backward(at, 1)
        finally:
            parameter.detach().copy_(before)

    def change(self, what: str, to: float) -> None:
        """Change something that a forward reads. `to` 1.0: back to what it was."""
        self.undo.pop(what, lambda: None)()
        for each in self.network.modules():
            if what == "attribute" and isinstance(each, Breaking):
                each.factor = 1.5 * to
            elif what == "dropout" and isinstance(each, nn.Dropout):
                each.p = to / 10
            elif what == "dropout" and isinstance(each, Tower):
                each.dropout = to / 5
        if what == "global":
            globals()["SCALE"] = to
        elif what == "context":
            GATE.set(to)
        elif to != 1.0:
            self.put(what, to)

    def put(self, what: str, to: float) -> None:
        linear = [each for each in self.network.modules() if isinstance(each, nn.Linear)]
        if what == "hook":
            self.undo[what] = linear[int(to)].register_forward_hook(lambda module, given, made: made * to).remove
        elif what == "hook on all":
            hook = nn.modules.module.register_module_forward_hook(lambda module, given, made: made * to)
            self.undo[what] = hook.remove
        elif what in ("function mode", "counter"):
            mode = Scaled(to) if what == "function mode" else FlopCounterMode(display=False)
            mode.__enter__()
            self.undo[what] = partial(mode.__exit__, None, None, None)
        elif what == "frozen":
            linear[int(to)].weight.requires_grad_(False)
            self.undo[what] = partial(linear[int(to)].weight.requires_grad_, True)
        elif what == "evaluated":
            linear[int(to)].eval()
            self.undo[what] = linear[int(to)].train

    def end(self) -> None:
        """The step is over: its results, and no gradients from here on."""
        self.write(*(parameter.grad for parameter in self.network.parameters()), *self.network.buffers())
        self.network.zero_grad()
        self.calm()

    def calm(self) -> None:
        for what in CHANGES:
            self.change(what, 1.0)


class Steps(RuleBasedStateMachine):
    """What the planned network does, a plain one does after each step."""

    made_by: Callable[[], nn.Module] = chain

    @initialize(
        told=st.integers(1, MOST),
        reverse=st.booleans(),
        share=st.floats(0.0, 1.0),
        gradient=st.booleans(),
        replans=st.booleans(),
    )
    def begin(self, told: int, reverse: bool, share: float, gradient: bool, replans: bool) -> None:
        self.replans = replans
        self.changes = CHANGES if replans else () if isinstance(self, CapturedSteps) else UNSEEN

        def planned(**options: Any) -> Checkpointable:
            torch.manual_seed(0)
            # Gradients are not freed in a step: its second pass finds those of the first.
            sample = rows(LARGEST, 0).requires_grad_(gradient)
            return Checkpointable(type(self).made_by(), sample, loss=square, **options)

        probe = planned(forwards_in_flight=MOST, mem_limit="1GB")
        self.least, self.stored = probe.budget.least_bytes(), probe.report().store_all_bytes
        self.planned, self.known = planned(forwards_in_flight=told, backward_order="reverse" if reverse else None), told
        self.checks: dict[str, int] = {}
        self.in_flight, self.gave_up = 0, False
        self.any_order = False
        """whether a backward has come while a later forward was in flight"""
        self.set_limit(share)
        GATE.set(1.0)  # an earlier history may have ended in the middle of a step
        globals()["SCALE"] = 1.0
        torch.manual_seed(0)
        self.worlds = tuple(World(each, gradient=gradient) for each in (self.planned, type(self).made_by()))
        self.meter = None if replans else memory_meter(CPU)  # planning anew needs the same profiler
        if self.meter is not None:
            self.meter.__enter__()
        self.steps = 0
        self.begin_step()

    def set_limit(self, share: float) -> None:
        least = max(self.least, self.planned.budget.least_bytes())  # more for what steps have shown meanwhile
        self.planned.compute_sequence(int(least + share * max(0, self.stored - least)))

    def begin_step(self) -> None:
        self.steps += 1
        self.most, self.in_order, self.changed, self.refused = 0, True, False, False
        self.done: list[Callable[[World], None]] = []
        self.mark(str(self.steps))

    def mark(self, name: str) -> None:
        if self.meter is not None:
            self.meter.mark(name)

    def go_backward(self, at: int) -> None:
        if at < self.in_flight - 1 and not self.any_order:
            self.any_order, self.in_order = True, False

    def do(self, act: Callable[[World], None], *, flying: int = 0) -> None:
        """Let the planned network act; `flying` more forwards are in flight afterwards."""
        self.done.append(act)
        try:
            if not self.refused:
                self.run(act, self.worlds[0], len(self.done))
        except (*REFUSED, RuntimeError) as error:  # autograd's own error, too, where a parameter was written to
            # A refused stage is stored from then on, which may need more than the limit.
            known = isinstance(error, REFUSED) and (self.changed or self.gave_up or self.replans)
            if not known and not (self.changed and "inplace" in str(error)):
                raise
            self.refused = self.gave_up = True
        self.in_flight += flying
        self.most = max(self.most, self.in_flight)

    def run(self, act: Callable[[World], None], world: World, number: int) -> None:
        torch.manual_seed(number)
        act(world)
        world.write(torch.get_rng_state())

    @precondition(lambda self: self.in_flight < MOST)
    @rule(size=st.sampled_from((2, 100, LARGEST, LARGEST)))
    def forward(self, size: int) -> None:
        seed = len(self.done)
        self.do(lambda world: world.forward(size, seed), flying=1)

    @precondition(lambda self: self.in_flight)
    @rule(at=st.integers(0, MOST), times=st.sampled_from((1, 1, 2)))
    def backward(self, at: int, times: int) -> None:
        chosen = at % self.in_flight
        self.go_backward(chosen)
        self.do(lambda world: world.backward(chosen, times), flying=-1)

    @precondition(lambda self: self.in_flight)
    @rule()
    def backward_of_a_sum(self) -> None:
        self.do(World.backward_of_a_sum, flying=-self.in_flight)

    @precondition(lambda self: self.in_flight)
    @rule(at=st.integers(0, MOST))
    def drop(self, at: int) -> None:
        chosen = at % self.in_flight
        self.do(lambda world: world.drop(chosen), flying=-1)

    @rule(size=st.sampled_from((2, 100, LARGEST)), training=st.booleans())
    def look(self, size: int, training: bool) -> None:
        self.do(lambda world: world.look(size, size, training))

    @rule()
    def break_forward(self) -> None:
        self.do(lambda world: world.break_forward(LARGEST))
        self.most = max(self.most, self.in_flight + 1)  # until it fails, it is in flight as well, and told of

    @precondition(lambda self: self.in_flight)
    @rule(at=st.integers(0, MOST))
    def break_backward(self, at: int) -> None:
        chosen = at % self.in_flight
        self.go_backward(chosen)
        self.do(lambda world: world.break_backward(chosen), flying=-1)

    @precondition(lambda self: self.changes)
    @rule(which=st.integers(0, len(CHANGES) - 1), to=st.sampled_from((0.5, 1.0, 2.0)))
    def change(self, which: int, to: float) -> None:
        """What the forwards in flight found is otherwise for their backwards, and for later forwards."""
        what, self.changed = self.changes[which % len(self.changes)], True
        self.do(lambda world: world.change(what, to))

    @precondition(lambda self: self.in_flight)
    @rule(at=st.integers(0, MOST), which=st.integers(0, 30))
    def write_before_backward(self, at: int, which: int) -> None:
        chosen, self.changed = at % self.in_flight, True
        self.go_backward(chosen)
        self.do(lambda world: world.write_before_backward(chosen, which), flying=-1)

    @precondition(lambda self: self.changes and not self.in_flight)
    @rule(which=st.integers(0, len(CHANGES) - 1), to=st.sampled_from((0.5, 2.0)), before=st.booleans())
    def change_around_one_of_both(self, which: int, to: float, before: bool) -> None:
        if before:
            self.change(which, to)
        self.forward(LARGEST)
        self.change(which, 1.0 if before else to)
        self.backward(0, 1)
        self.end_step(None)

    @precondition(lambda self: not self.in_flight)
    @rule(which=st.integers(0, 30))
    def write_between(self, which: int) -> None:
        self.forward(LARGEST)
        self.write_before_backward(0, which)
        self.end_step(None)

    @precondition(lambda self: self.in_flight)
    @rule()
    def evaluate_backward(self) -> None:
        self.do(World.evaluate_backward, flying=-1)

    @precondition(lambda self: not self.in_flight)
    @rule(share=st.none() | st.floats(0.0, 1.0))
    def end_step(self, share: float | None) -> None:
        if self.refused:
            self.worlds[0].flying.clear()
            World.end(self.worlds[0])
        self.do(World.end)
        self.mark(f"twin of {self.steps}")
        if self.refused:  # before a wrong number is made; the step is given up
            self.worlds[1].network.load_state_dict(self.planned.state_dict())
        else:
            for number, act in enumerate(self.done, 1):
                self.run(act, self.worlds[1], number)
            assert self.worlds[0].log == self.worlds[1].log
        for world in self.worlds:
            world.log.clear()
        # The first backward in another order than was planned for may take the step over its limit, with a warning.
        if (
            not self.changed
            and self.most <= self.known
            and (self.in_order or self.planned.budget.backward_order == "any")
        ):
            self.checks[str(self.steps)] = self.planned.mem_limit
        self.known = max(self.known, self.most)
        if share is not None:
            self.set_limit(share)
        if self.changed or self.refused:
            gc.collect()  # torch's FlopCounterMode leaves a graph in a cycle, and so does an error of the engine
        self.begin_step()

    def teardown(self) -> None:
        for world in self.worlds:
            world.flying.clear()
            world.calm()
            world.network.zero_grad()
        gc.collect()  # the error of a forward that fails beside others is part of a cycle
        present = sum(each.nbytes for each in (*self.planned.parameters(), *self.planned.buffers()))
        if self.meter is None:
            return
        self.meter.mark("over")
        self.meter.__exit__(None, None, None)
        if self.gave_up and "1" not in self.meter.phases:
            return  # the captured model was planned anew, and the meter stopped
        for step, limit in self.checks.items():
            assert present + self.meter.phases[step].rise <= limit + OWN, (step, limit)
        starts = [phase.start for name, phase in self.meter.phases.items() if name.isdigit() or name == "over"]
        assert max(starts) - min(starts) <= OWN, "something is left from one step to the next"


class CapturedSteps(Steps):
    """The same for a model that TorchDynamo captures."""

    made_by = partial(Tower, WIDTH, 5, 0.2)


@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (Steps, 2),
        (CapturedSteps, 1),
        pytest.param(Steps, 25, marks=pytest.mark.slow),
        pytest.param(CapturedSteps, 10, marks=pytest.mark.slow),
    ],
)
def test_any_step_is_that_of_plain_training_inside_the_limit(machine: type[Steps], examples: int) -> None:
    """Without room for the second forward in flight, a hundred examples find a step over its limit; twelve do not."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


# Smaller ones save too little for a file.
@pytest.mark.parametrize(("name", "size"), [("chain", 8), pytest.param("file", 12, marks=pytest.mark.slow)])
def test_bytes_peaks_and_numbers_hold_over_steps_of_changing_size(name: str, size: int, monkeypatch) -> None:
    monkeypatch.setattr(soak, "SIZE", size)
    found = soak.soak(name, steps=12, every=3)
    assert found.problems() == []
    assert found.samples == 2
    assert found.peak_bytes > 0.8 * found.limit_bytes  # the limit is not just never met
