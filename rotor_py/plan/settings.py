"""What the user asked for: the limit, and all that planning depends on beside the model and its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from rotor_py.by_hand.strategy import ByHand
from rotor_py.compiled.options import Compile, config_of
from rotor_py.compiled.stage_code import Config
from rotor_py.errors import InvalidTypeError, InvalidValueError, what_it_is
from rotor_py.plan.conflicts.offload import refuse_beside_offload
from rotor_py.plan.conflicts.step_in_backward import refuse_beside_step_in_backward
from rotor_py.stage.keepers.fewer_bits import FEWER_BITS
from rotor_py.stage.keepers.form_keeper import FormKeeper
from rotor_py.stage.keepers.packed import Packed
from rotor_py.stage.ways.elsewhere import ELSEWHERE
from rotor_py.stage.ways.keeper import Keeper
from rotor_solver.in_flight import ORDERS
from rotor_solver.progress import Progress


@dataclass(slots=True)
class Settings:
    """The arguments of `Checkpointable`, which describes them. They may be changed at any time.

    A change counts from the next plan on: the plan in use is right for what was asked when it was made.
    """

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
    inductor: Config | None = field(init=False, default=None)
    """what Inductor is told; None where nothing is to be compiled"""
    keepers: tuple[Keeper, ...] = field(init=False, default=())
    """ways to store a stage, beside its own, that may be planned with"""

    def __post_init__(self) -> None:
        """TypeError if `optimizer` or `step_in_backward` is no optimizer: its class, for example.

        ValueError if `forwards_in_flight` is not a whole number, one at least, if `backward_order` is none, if `on_oom`
        `step_in_backward` or `offload` cannot be done, if `compile` is nothing that `torch.compile` takes, or if `keep`
        is no word for fewer bits, or beside a strategy by hand.
        """
        forwards = self.forwards_in_flight
        if isinstance(forwards, bool) or not isinstance(forwards, int) or forwards < 1:
            raise InvalidValueError(
                f"forwards_in_flight is {forwards!r}; it has to be a whole number, one at least",
                kind="not_a_count",
                name="forwards_in_flight",
            )
        if self.backward_order not in (None, *ORDERS):
            raise InvalidValueError(
                f"backward_order is {self.backward_order!r}; it can be {' or '.join(map(repr, ORDERS))}",
                kind="unknown_value",
                name="backward_order",
            )
        for name, given in (("optimizer", self.optimizer), ("step_in_backward", self.step_in_backward)):
            if given is not None and (isinstance(given, type) or not hasattr(given, "param_groups")):
                raise InvalidTypeError(
                    f"{name} is {what_it_is(given)}; pass the optimizer that will step, made of the model's parameters",
                    kind="not_an_optimizer",
                    name=name,
                )
        self._refuse_on_oom()
        self._refuse_keep()
        refuse_beside_step_in_backward(self)
        refuse_beside_offload(self)
        if self.step_in_backward is not None:
            self.optimizer = self.step_in_backward
        self.inductor = config_of(self.compile)
        self.keepers = self._keepers()

    def _refuse_on_oom(self) -> None:
        if self.on_oom not in ("raise", "replan"):
            raise InvalidValueError(
                f"on_oom is {self.on_oom!r}; it can be 'raise' or 'replan'", kind="unknown_value", name="on_oom"
            )
        if not self.replans:
            return
        if self.by_hand is not None:
            raise InvalidValueError(
                f"on_oom='replan' looks for a plan that needs less, and {self.by_hand} leaves no choice",
                kind="excluded_together",
                name="on_oom",
            )
        if not self.preserve_rng_state:
            raise InvalidValueError(
                "on_oom='replan' runs stages again with the same random numbers, and preserve_rng_state=False gives "
                "that up; leave one of them out",
                kind="excluded_together",
                name="preserve_rng_state",
            )

    def _refuse_keep(self) -> None:
        if self.keep is None:
            return
        if self.keep not in FEWER_BITS:
            raise InvalidValueError(
                f"keep is {self.keep!r}; it can be {', '.join(map(repr, FEWER_BITS))}, or None for exact",
                kind="unknown_value",
                name="keep",
            )
        if self.by_hand is not None:
            raise InvalidValueError(
                f"keep={self.keep!r} lets the plan choose what is kept in fewer bits, and {self.by_hand} leaves no "
                "choice; leave one of them out",
                kind="excluded_together",
                name="keep",
            )

    @property
    def replans(self) -> bool:
        """Whether a step that runs out of memory is undone, and runs again by a plan that needs less."""
        return self.on_oom == "replan"

    def _keepers(self) -> tuple[Keeper, ...]:
        if self.by_hand is not None:  # what is kept is settled
            return ()
        fewer = () if self.keep is None else (FormKeeper(FEWER_BITS[self.keep]),)
        return (FormKeeper(Packed()), *fewer, *(() if self.offload is None else (ELSEWHERE,)))

    @property
    def solved_with(self) -> tuple[float | str | None, int]:
        """What a sequence depends on that the user may change after it was found."""
        return self.mem_limit, self.mem_slots
