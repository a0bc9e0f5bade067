"""What autograd saves outside the graphs that TorchDynamo captures, while a model is measured.

Such memory cannot be planned: between graphs the model's own code runs, and nothing can run a part of it again.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rotor_profiling.storage import storages

# Frames of torch and of this package are on the stack of every operator; the line to name is the user's.
_LIBRARIES = Path(torch.__file__).resolve().parent, Path(__file__).resolve().parent.parent
_RECURRENT = inspect.getsourcefile(nn.RNNBase)


class SavedOutside:
    """While entered and not suspended, notes the tensors that autograd saves, and the line that made it save them."""

    def __init__(self, known: set[int]) -> None:
        """`known` are the addresses of storages that do not count, such as those of parameters."""
        self.known = known
        self.bytes: dict[int, int] = {}
        self.lines: dict[str, int] = {}
        self.packed_line: str | None = None
        """A line that runs a recurrent layer on a packed sequence."""
        # Dynamo would trace the hooks as a part of the model, and compile them again for every kind of tensor.
        pack, unpack = torch.compiler.disable(self._note), torch.compiler.disable(lambda tensor: tensor)
        self._hooks = saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> SavedOutside:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Note nothing, and have no hooks: graphs run inside, and what they save is measured there."""
        self._hooks.__exit__(None, None, None)
        try:
            yield
        finally:
            self._hooks.__enter__()

    @property
    def total_bytes(self) -> int:
        """Bytes of memory that is saved outside graphs, each storage once."""
        return sum(self.bytes.values())

    @property
    def line(self) -> str:
        """The line of the model that saves most: path:number."""
        return max(self.lines, key=self.lines.__getitem__)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        # By storage: several operators may save the same tensor, or views of it.
        new = {at: size for at, size in storages([tensor]).items() if at not in self.known and at not in self.bytes}
        if new:
            self.bytes |= new
            line = _user_line()
            if any(_runs_packed(frame) for frame, _ in traceback.walk_stack(None)):
                self.packed_line = line
            self.lines[line] = self.lines.get(line, 0) + sum(new.values())
        return tensor.detach()  # a result that is saved with its history would hold its own node, for good


def _runs_packed(frame: FrameType) -> bool:
    """Whether a frame is the forward of a recurrent layer on a packed sequence."""
    # By their variable: Dynamo runs parts of a forward as functions of its own, in the same file.
    return frame.f_code.co_filename == _RECURRENT and frame.f_locals.get("batch_sizes") is not None


def _user_line() -> str:
    """The innermost line that is neither torch's nor this package's, as path:number."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not any(library in path.resolve().parents for library in _LIBRARIES) and path.suffix == ".py":
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"
