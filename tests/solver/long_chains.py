"""Chains too long for hypothesis, and the solver made to run by compiled kernels or by plain Python."""

from dataclasses import replace

import numpy as np
import pytest

from rotor_solver import Chain, Option, Stage, jit_policy, min_bytes, simulate, store_all


def fresh_process(monkeypatch: pytest.MonkeyPatch, spent: float = 0.0) -> None:
    """The solver as it begins, but for so many seconds of plain work: infinitely many mean compiled kernels."""
    monkeypatch.setattr(jit_policy._Pace, "compiled", set())
    monkeypatch.setattr(jit_policy._Pace, "spent", spent)


def random_chain(length: int, seed: int = 0) -> Chain:
    """Times and sizes of every magnitude, which no slot divides."""
    rng = np.random.default_rng(seed)
    forward = rng.lognormal(0, 0.7, length)
    sizes = (1e8 * rng.lognormal(0, 0.7, length + 1)).astype(np.int64)
    return Chain.from_arrays(
        forward_time=forward,
        backward_time=[*(forward * rng.uniform(1.5, 2.5, length)), 0.1],
        activation=sizes,
        saved=(sizes[1:] * rng.uniform(1, 4, length)).astype(np.int64),
        forward_temp=(sizes[1:] * rng.uniform(0, 1, length)).astype(np.int64),
        backward_temp=[*(sizes[1:] * rng.uniform(0, 1, length)).astype(np.int64), 0],
    )


def repeated_chain(length: int, period: int = 3, *, tail: int = 2) -> Chain:
    """An odd stage, `period` kinds of stages in turn, and some odd ones again: a transformer, as costs."""
    kinds, odd = random_chain(period, seed=1), random_chain(1 + tail, seed=2)
    order = [odd.stages[0], *(kinds.stages[i % period] for i in range(length)), *odd.stages[1:]]
    return Chain(tuple(order), odd.input_bytes, loss_time=0.1)


def limit_between(chain: Chain, fraction: float) -> int:
    least, whole = min_bytes(chain), simulate(chain, store_all(chain)).peak
    return int(least + fraction * (whole - least))


def rich_chain(length: int, seed: int, *, whole: bool) -> Chain:
    """Options, gradients, large scratch, inputs that are released; sizes of a few bytes if `whole`."""
    rng = np.random.default_rng(seed)
    base = random_chain(length, seed)
    unit = 2e7 if whole else 1.0
    incoming, stages = base.input_bytes, []
    for stage in replace(base, input_bytes=int(base.input_bytes / unit)).stages:
        activation, saved = int(stage.activation / unit), int(stage.options[0].saved / unit)
        scratch = [int(rng.choice([0, 1, 4]) * rng.uniform() * saved) for _ in range(4)]
        first = replace(stage.options[0], saved=saved, forward_temp=scratch[0], backward_temp=scratch[1])
        second = Option(first.forward_time * 1.4, first.backward_time, int(saved * 0.6), scratch[2], scratch[3])
        stages.append(
            Stage(
                activation,
                (first, second) if rng.uniform() < 0.3 else (first,),
                nograd_time=first.forward_time * 0.8,
                nograd_temp=int(rng.choice([0, 0, 30]) * rng.uniform() * activation),
                gradient=int(rng.choice([0, 1]) * saved // 5),
                input_released=int(rng.choice([0, 1])) * int(incoming / unit),
            )
        )
        incoming = stage.activation
    return Chain(tuple(stages), int(base.input_bytes / unit), 0.1, output_held=bool(seed % 2))
