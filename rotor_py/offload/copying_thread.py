"""A thread that copies beside training, one copy after the other, in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from rotor_py.errors import OffloadError


class Copy:
    """One copy: `run` does it, without the interpreter's lock, to or from memory that `keeps` keeps alive."""

    def __init__(self, run: Callable[[], None], keeps: Any) -> None:
        self._run: Callable[[], None] | None = run
        self._keeps = keeps
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._abandoned = False

    @property
    def over(self) -> bool:
        """Whether it has come to its end, or failed."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until it is over, and let go of the memory. OffloadError if it failed."""
        self._over.wait()
        self._keeps = None
        # A new error each time: one that is kept would keep the frames that it went through, and those this copy.
        if isinstance(self._error, OffloadError):
            raise OffloadError(str(self._error)) from self._error.__cause__
        if self._error is not None:
            raise OffloadError(f"an activation could not be copied: {self._error!r}; run the step again")

    def abandon(self) -> None:
        """Nobody waits any more: the memory is let go of as soon as the copy is over."""
        # In this order, and in the other one in `do`: whichever thread comes second sees what the first has done.
        self._abandoned = True
        if self.over:
            self._keeps = None

    def do(self) -> None:
        """Do it, in the thread that copies."""
        run, self._run = self._run, None
        assert run is not None
        try:
            run()
        except BaseException as error:  # whatever it is, the thread that waits is to have it
            self._error = error.with_traceback(None)
        self._over.set()
        if self._abandoned:
            self._keeps = None


class CopyingThread:
    """Does copies in a thread of its own, which begins with the first one and ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self, copy: Copy) -> None:
        """Have a copy done. RuntimeError where the interpreter makes no more threads."""
        with self._starting:
            if self._thread is None:
                # The thread refers to the queue alone: it keeps nobody alive who could end it.
                self._thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(copy)

    def end(self) -> None:
        """End the thread, once all that was started is over."""
        thread, self._thread = self._thread, None
        self._queue.put(None)
        # The garbage collector may call this in any thread, in this very one as well.
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _work(queue: SimpleQueue[Copy | None]) -> None:
    while True:
        copy = queue.get()
        if copy is None:
            return
        copy.do()
        del copy  # while it waits for the next one, it keeps nothing
