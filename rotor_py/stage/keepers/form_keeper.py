"""A way to store any stage: what autograd saves of it is kept in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from rotor_profiling.storage import storages, tensors_in
from rotor_profiling.torch_classes import is_fake
from rotor_py.stage.keepers.keeper import LEAST_BYTES, Form, Keeping, is_plain
from rotor_py.stage.keepers.readers import Need
from rotor_py.stage.keepers.saved import Kept, Saved
from rotor_py.stage.protocol import Run, offers_of
from rotor_py.stage.ways.keeper import Trial

K = TypeVar("K", bound=Keeping)

_STATISTICS = 16
"""What is saved of a stage and is this much smaller than its input is one number for each row: a mean, or the logarithm
of a sum. All numbers of a row are computed with it, so it is not rounded, and it is hardly any memory. Rows are longer
than this, as a rule: the smallest heads of attention have 32 numbers."""
_LEAST_SHARE = 0.02
"""The part of what is saved that a form has to spare, for its bytes to be measured: of a stage that is stored in part,
it may be several times as much."""


class SmallerKept(Kept, Protocol):
    """A tensor in fewer bytes."""

    @property
    def nbytes(self) -> int:
        """The bytes in which it is kept."""
        ...


class SmallerForm(Form, Protocol):
    """A form that takes fewer bytes than a tensor itself, in the same memory."""

    def keep(self, memory: torch.Tensor) -> SmallerKept | None:
        """Keep `memory`, as `Form` does; None if it would not get smaller."""
        ...

    def keep_sign(self, memory: torch.Tensor, need: Need) -> SmallerKept | None:
        """Keep which numbers of `memory` are positive, as `FormOfSigns` does."""
        ...


@dataclass(frozen=True, slots=True)
class FormKeeper:
    """Keeps what autograd saves in the forward of a stage in a form."""

    form: SmallerForm
    keeps_the_rest: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """That of the form."""
        return self.form.name

    def suits(self, function: Callable[..., Any]) -> bool:
        """Whether hooks see what autograd saves of a stage: what compiled code saves, it decides by itself."""
        return offers_of(function).saves_through_hooks

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """`run`, a run of `function`, so that what its graph saves is in this form. It makes the same values."""

        def kept(value: Any) -> Any:
            with self._keeping(self.form, function, value, Keeping) as keeping:
                output = run(value)
                keeping.spare(tensors_in(output))
            return output

        return kept

    def trial(self, function: Callable[..., Any]) -> Trial:
        """Tells whether the form spares a part of what is saved that is worth measuring, by a run of `function`."""
        return _Trial(self, function)

    def _keeping(self, form: Form, function: Callable[..., Any], value: Any, kind: type[K]) -> K:
        inputs = tensors_in(value)
        largest = max((each.untyped_storage().nbytes() for each in inputs), default=0)
        least = LEAST_BYTES if self.form.exact else max(LEAST_BYTES, largest // _STATISTICS)
        return kind(form, [*inputs, *_owned(function)], least_bytes=least)


class _Trial:
    """A run of a stage whose graph saves everything as it is, and what it would save in the form of `keeper`."""

    def __init__(self, keeper: FormKeeper, function: Callable[..., Any]) -> None:
        self.pays = False
        self.saved_bytes: int | None = None
        self._keeper, self._function = keeper, function

    def watch(self, run: Run) -> Run:
        """`run`, which is watched."""

        def watched(value: Any) -> Any:
            tried = _Tried(self._keeper.form)
            noting = self._keeper._keeping(tried, self._function, value, _Noting)
            with noting:
                output = run(value)
                noting.settle(tensors_in(output))
            outputs = {each.untyped_storage()._cdata for each in tensors_in(output)}
            saved = sum(plain for plain, _ in tried.storages.values())
            spared = sum(plain - kept for address, (plain, kept) in tried.storages.items() if address not in outputs)
            self.pays = spared >= _LEAST_SHARE * saved and spared > 0
            there = storages(tensors_in([value, output, _owned(self._function)]))
            self.saved_bytes = sum(size for address, size in noting.seen.items() if address not in there)
            tried.let_go()  # the graph holds it for as long as it is there itself
            return output

        return watched


class _Noting(Keeping):
    """Notes all storages that autograd saves, and their bytes."""

    def __init__(self, form: Form, untouched: Iterable[torch.Tensor], *, least_bytes: int) -> None:
        super().__init__(form, untouched, least_bytes=least_bytes)
        self.seen: dict[int, int] = {}

    def save(self, tensor: torch.Tensor, *, for_numbers: bool = False) -> Saved:
        """As `Keeping` does."""
        if is_plain(tensor) or is_fake(tensor):
            self.seen.update(storages([tensor]))
        return super().save(tensor, for_numbers=for_numbers)


def _owned(function: Callable[..., Any]) -> list[torch.Tensor]:
    return [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []


class _Tried:
    """A form that keeps nothing, and notes what another one would."""

    exact = True

    def __init__(self, form: SmallerForm) -> None:
        self.name = form.name
        self.storages: dict[int, tuple[int, int]] = {}
        """of each, by its address: its bytes, and those in the other form that it is kept in at last"""
        self._form = form
        self._memory: list[torch.Tensor] = []  # held, so that no address is used twice

    def let_go(self) -> None:
        """Hold no tensors any more."""
        self._memory.clear()

    def keep(self, memory: torch.Tensor) -> Kept | None:
        """Keep nothing."""
        self._note(memory, self._form.keep(memory))
        return None

    def keep_sign(self, memory: torch.Tensor, need: Need) -> Kept | None:
        """Keep nothing."""
        self._note(memory, self._form.keep_sign(memory, need))
        return None

    def _note(self, memory: torch.Tensor, kept: SmallerKept | None) -> None:
        storage = memory.untyped_storage()
        self._memory.append(memory)
        self.storages[storage._cdata] = storage.nbytes(), storage.nbytes() if kept is None else kept.nbytes
