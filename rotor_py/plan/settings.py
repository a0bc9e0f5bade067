"""Hold and check the user's settings: the limit, and all other arguments of `Checkpointable` that change a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from rotor_profiling.optimizer import steps_per_parameter
from rotor_py.by_hand.strategy import ByHand
from rotor_py.compile.stage_code import Compile, Config, config_of
from rotor_py.errors import InvalidTypeError, InvalidValueError, what_it_is
from rotor_py.offload.open_tier import checked_name
from rotor_py.stage.compression import FEWER_BITS, Packed
from rotor_py.stage.protocol import ELSEWHERE, Keeper
from rotor_solver.described_error import check_count
from rotor_solver.in_flight import ORDERS
from rotor_solver.watching import Progress


@dataclass(slots=True)
class Settings:
    """The arguments of `Checkpointable`, documented there. If a setting changes, only plans made later follow it."""

    mem_limit: float | str | None = None
    mem_slots: int = 500
    verbosity: int = 0
    preserve_rng_state: bool = True
    loss_tmp_memory_usage: int = 0
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    fresh_grads: bool = False
    progress: Progress | bool | None = None
    cache: bool = True
    granularity: int = 100
    process_group: ProcessGroup | None = None
    by_hand: ByHand | None = None
    forwards_in_flight: int = 1
    backward_order: str | None = None
    watch: bool | None = None
    on_oom: str = "raise"
    compile: Compile = False
    step_in_backward: torch.optim.Optimizer | None = None
    offload: str | None = None
    keep: str | None = None
    inductor: Config | None = field(init=False, default=None)  # Inductor's options; None: no stage is to be compiled
    # storage modes, for stages of any kind, that compress or offload saved tensors
    keepers: tuple[Keeper, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        check_count(self.forwards_in_flight, "forwards_in_flight")
        values = {"backward_order": (None, *ORDERS), "on_oom": ("raise", "replan"), "keep": (None, *FEWER_BITS)}
        for name, known in values.items():
            if (value := getattr(self, name)) not in known:
                raise InvalidValueError(
                    f"{name} must be {' or '.join(map(repr, known))}, got {value!r}", kind="unknown_value", name=name
                )
        for name, given in (("optimizer", self.optimizer), ("step_in_backward", self.step_in_backward)):
            if given is not None and (isinstance(given, type) or not hasattr(given, "param_groups")):
                text = f"{name} must be the optimizer of the model's parameters, got {what_it_is(given)}"
                raise InvalidTypeError(text, kind="not_an_optimizer", name=name)
        if self.offload is not None:
            self.offload = checked_name(self.offload)  # with an absolute path
        refuse_excluded(self)
        if self.step_in_backward is not None:
            refuse_optimizer(self.step_in_backward)
            self.optimizer = self.step_in_backward
        self.inductor = config_of(self.compile)
        self.keepers = () if self.by_hand is not None else self._keepers()  # a strategy by hand uses none

    def _keepers(self) -> tuple[Keeper, ...]:
        fewer = () if self.keep is None else (FEWER_BITS[self.keep],)
        return (Packed(), *fewer, *(() if self.offload is None else (ELSEWHERE,)))

    @property
    def solved_with(self) -> tuple[float | str | None, int]:
        """Memory limit and number of slots: if the user changes one of them, a solved plan has to be solved again."""
        return self.mem_limit, self.mem_slots


SEVERAL_PROCESSES = "several processes"
SHARDED = "a model of fully_shard"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two settings that exclude each other. In the reason `why`, `{given}` is the second as the user has written it."""

    first: str
    second: str
    why: str


EXCLUSIONS = (
    Exclusion("step_in_backward", "another optimizer", "one optimizer steps; leave optimizer out"),
    Exclusion("step_in_backward", "forwards_in_flight > 1", "the first backward steps parameters that others need"),
    Exclusion("step_in_backward", "on_oom='replan'", "it repeats a backward that has stepped parameters"),
    Exclusion("step_in_backward", SEVERAL_PROCESSES, "gradients are complete only after all processes communicate"),
    Exclusion("on_oom='replan'", "level or every_n_layers", "{given} fixes the plan, so none needs less"),
    Exclusion("on_oom='replan'", "preserve_rng_state=False", "recomputed stages need the same random numbers"),
    Exclusion("on_oom='replan'", SEVERAL_PROCESSES, "other processes would wait while this one recomputes stages"),
    Exclusion("keep", "level or every_n_layers", "{given} fixes how tensors are stored"),
    Exclusion("offload", "level or every_n_layers", "{given} plans no offloads"),
    Exclusion("offload", "forwards_in_flight > 1", "several forwards would share the link"),
    Exclusion("offload", "on_oom='replan'", "stages to recompute have offloaded their tensors"),
    Exclusion("offload", "compile", "Inductor decides which tensors a stage saves"),
    Exclusion("offload", SHARDED, "its stages run in regions, which save only inputs"),
    Exclusion("plan", "level or every_n_layers", "both choose the recomputed stages; give one"),
)
"""Pairs of settings that exclude each other, with reasons. docs/training.md has the same table."""


def _given(settings: Settings) -> dict[str, str]:
    stepping, optimizer, forwards = settings.step_in_backward, settings.optimizer, settings.forwards_in_flight
    given = {
        "another optimizer": ("optimizer=", stepping is not None and optimizer not in (None, stepping)),
        "compile": ("compile=", bool(settings.compile)),
        "forwards_in_flight > 1": (f"forwards_in_flight={forwards}", forwards > 1),
        "keep": (f"keep={settings.keep!r}", settings.keep is not None),
        "level or every_n_layers": (str(settings.by_hand), settings.by_hand is not None),
        "offload": ("offload=", settings.offload is not None),
        "on_oom='replan'": ("on_oom='replan'", settings.on_oom == "replan"),
        "preserve_rng_state=False": ("preserve_rng_state=False", not settings.preserve_rng_state),
        "step_in_backward": ("step_in_backward", stepping is not None),
    }
    return {name: text for name, (text, asked) in given.items() if asked}


def refuse_excluded(settings: Settings, **more: str) -> None:
    given = {**_given(settings), **more}
    for each in EXCLUSIONS:
        if each.first in given and each.second in given:
            first, second = given[each.first], given[each.second]
            why = each.why.format(given=second)
            remedy = "" if ";" in why else "; leave one of them out"
            text = f"{first} and {second} exclude each other: {why}{remedy}"
            name = each.first.partition("=")[0]
            raise InvalidValueError(text, kind="excluded_together", name=name, other=each.second)


def one_process_only(settings: Settings, sharded: str = SEVERAL_PROCESSES) -> Exclusion | None:
    """Return the exclusion of `sharded` (`SEVERAL_PROCESSES` or `SHARDED`) by a setting that the user gave, or None."""
    given = _given(settings)
    return next((each for each in EXCLUSIONS if each.second == sharded and each.first in given), None)


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless `optimizer` is known to step each parameter alone, or if it has differentiable=True."""
    if not steps_per_parameter(optimizer):
        name = type(optimizer).__name__
        text = f"step_in_backward must be SGD, Adam, AdamW or another that steps each parameter alone, got {name}"
        raise InvalidValueError(text, kind="unsupported_optimizer", name=name)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        text = "step_in_backward cannot differentiate through optimizer steps; leave differentiable=True out"
        raise InvalidValueError(text, kind="excluded_together", name="differentiable")
