"""Ways to store that need nothing of the stage: what autograd saves is kept in another form, or in another place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rotor_py.stage.protocol import Run


class Keeper(Protocol):
    """Keeps what autograd saves in the forward of any stage.

    Processes that train together have to have the same keepers.
    """

    @property
    def name(self) -> str:
        """The name of the way: what follows "stored" in a report. It is written into plans, so it must not change."""

    @property
    def keeps_the_rest(self) -> bool:
        """Whether it may be asked to keep what another keeper of the same run has left as it is."""

    def suits(self, function: Callable[..., Any]) -> bool:
        """Whether a stage can be stored in this way."""

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        """`run`, a run of the stage `function`, as one whose graph has saved its tensors in this way.

        It makes the same values.
        """

    def pays(self, run: Run, function: Callable[..., Any], value: Any) -> bool:
        """Whether the way is worth measuring for `run` on `value`, which may be run to find that out."""
