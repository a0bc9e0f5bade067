"""Several models at once, several forwards at once, several threads at once: each has the numbers that it has alone.

The random stream of a device is one for all threads of a process, so what holds for threads holds for models that draw
no random numbers; those of one thread may.
"""

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from tests.checkpointable.steps import square
from tests.training.loop import Mixer, Training, chain, differences, planned, rows

Kind = Callable[..., nn.Module]
KINDS = [chain, Mixer]


@pytest.fixture
def _switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def made(kind: Kind, seed: int = 0, **options: float) -> nn.Module:
    torch.manual_seed(seed)
    return kind(**options)


def gradients(*models: nn.Module) -> list[torch.Tensor]:
    return [p.grad for model in models for p in model.parameters()]


def in_threads(*tasks: Callable[[], object]) -> None:
    """Run every task in a thread of its own, all beginning together; the first error is raised here."""
    start = threading.Barrier(len(tasks))
    with ThreadPoolExecutor(len(tasks)) as pool:
        for each in [pool.submit(lambda task=task: (start.wait(), task())) for task in tasks]:
            each.result()


def test_overlapping_steps_and_forwards_in_any_order_and_another_thread_have_the_bits_of_plain_training() -> None:
    plain = [made(kind, seed) for seed, kind in enumerate(KINDS)]
    both = [planned(copy.deepcopy(model)) for model in plain]
    for order in ((0, 1), (1, 0)):
        for models in (plain, both):
            torch.manual_seed(7)
            losses = [square(model(rows(i))) for i, model in enumerate(models)]
            for index in order:
                losses[index].backward()
        assert all(map(torch.equal, gradients(*both), gradients(*plain)))
    for which, order in itertools.product((0, 1), ((0, 1, 2), (2, 0, 1))):  # of one model, in flight at once
        for model in (plain[which], both[which]):
            torch.manual_seed(7)
            losses = [square(model(rows(i))) for i in range(3)]
            losses[order[0]].backward()
            for index in order[1:]:
                in_threads(losses[index].backward)
        assert all(map(torch.equal, gradients(both[which]), gradients(plain[which])))


@pytest.mark.usefixtures("_switching")
def test_threads_that_plan_and_train_their_own_models_do_what_they_do_alone() -> None:
    plain = [made(kind, seed, dropout=0.0) for seed, kind in enumerate((Mixer, Mixer, chain))]
    models = copy.deepcopy(plain)
    for model in plain:
        Training(model).run(4)
    found: dict[int, Training] = {}

    def task(index: int) -> None:
        found[index] = Training(planned(models[index])).run(4)

    in_threads(*(partial(task, index) for index in range(3)))
    for index, model in enumerate(plain):
        assert not differences(dict(found[index].model.state_dict()), dict(model.state_dict()))
        assert all(map(torch.equal, gradients(found[index].model), gradients(model)))


@pytest.mark.usefixtures("_switching")
def test_what_is_measured_while_another_thread_trains_is_what_is_measured_alone() -> None:
    busy, stop = planned(made(chain, 1, dropout=0.0)), threading.Event()
    found: list[tuple[object, ...]] = []

    def plan() -> None:
        try:
            found.append(measured(made(Mixer, dropout=0.0)))
        finally:
            stop.set()

    def train() -> None:
        while not stop.is_set():
            square(busy(rows())).backward()

    in_threads(plan, train)
    assert found == [measured(made(Mixer, dropout=0.0))]


def measured(model: nn.Module) -> tuple[object, ...]:
    network = Checkpointable(model, rows(), loss=square)
    sizes = [(s.activation_bytes, s.saved_bytes, s.forward_temp_bytes, s.backward_temp_bytes)
             for s in network.inspection_values.stages]  # fmt: skip
    return (network.budget.least_bytes(), *sizes)
