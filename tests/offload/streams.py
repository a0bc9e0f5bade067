"""Streams of CUDA without CUDA: what is given to them runs late, in any order that their waits allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Over as soon as its stream has done its first `position` pieces of work."""

    stream: Stream
    position: int


@dataclass
class Stream:
    work: list[Callable[[], object] | Event] = field(default_factory=list)
    done: int = 0

    def give(self, kernel: Callable[[], object]) -> None:
        self.work.append(kernel)

    def record_event(self) -> Event:
        return Event(self, len(self.work))

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.work.append(other.record_event())

    def run(self, position: int | None = None) -> None:
        """Do the work up to `position`, all of it by default, and of other streams only what it waits for."""
        while self.done < (len(self.work) if position is None else position):
            each = self.work[self.done]
            self.done += 1
            if isinstance(each, Event):
                each.stream.run(each.position)
            else:
                each()


class Device:
    """The stream that trains, and whichever is the current one."""

    def __init__(self) -> None:
        self.training, self.out, self.back = Stream(), Stream(), Stream()
        self.current = self.training

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
