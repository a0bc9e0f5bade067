"""Random valid sequences: not only those that a solver would find, but anything that the operations can express."""

import random

from rotor_solver import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Operation, Sequence


def persistent_sequence(length: int, rng: random.Random) -> Sequence:
    """A random memory-persistent sequence: every interval is split at random."""

    def interval(first: int, last: int) -> list[Operation]:
        if first > last:
            return []
        if first == length:
            return [Loss()]
        if first == last or rng.random() < 0.4:
            return [ForwardEnable(first), *interval(first + 1, last), Backward(first)]
        middle = rng.randint(first + 1, last)
        forwards = [ForwardCheck(first), *(ForwardNograd(k) for k in range(first + 1, middle))]
        return [*forwards, *interval(middle, last), *interval(first, middle - 1)]

    return Sequence(interval(0, length))


def any_sequence(length: int, rng: random.Random, detours: int = 12) -> Sequence:
    """A random walk over all operations that are possible, which in the end finds its way to the gradient of a_0.

    Checkpoints are dropped before their use, stages run again for nothing, saved sets are made long before the loss.
    """
    walk = _Walk(length)
    while not walk.lost:
        possible = walk.possible() if detours > 0 and rng.random() < 0.7 else []
        walk.do(rng.choice(possible) if possible else walk.towards(length, Loss()))
        detours -= 1
    detours = 12
    while walk.delta > 0:
        stage, forwards = walk.delta - 1, walk.possible()
        goal = Backward(stage) if walk.delta in walk.saved else ForwardEnable(stage)
        wander = forwards and detours > 0 and rng.random() < 0.4
        walk.do(rng.choice(forwards) if wander else walk.towards(stage, goal))
        detours -= 1
    return Sequence(walk.operations)


def everything_again(length: int) -> Sequence:
    """Every stage runs without a graph first, and again from the chain's input each time."""
    found: list[Operation] = [ForwardCheck(0), *(ForwardNograd(k) for k in range(1, length)), Loss()]
    for stage in reversed(range(length)):
        found += [ForwardCheck(0)] * (stage > 0) + [ForwardNograd(k) for k in range(1, stage)]
        found += [ForwardEnable(stage), Backward(stage)]
    return Sequence(found)


class _Walk:
    def __init__(self, length: int) -> None:
        self.length = length
        self.operations: list[Operation] = []
        self.plain, self.saved = {0}, set[int]()
        self.delta, self.lost = length, False

    def possible(self) -> list[Operation]:
        """What can run next; a_0 is never given up, so that there is always a way on.

        Nor is the input of a stage that has a graph: autograd would hold on to it.
        """
        here = self.plain | self.saved
        found: list[Operation] = []
        for i in here - {self.length}:
            free = i + 1 not in self.saved
            found += [ForwardCheck(i)] + [ForwardNograd(i)] * (i > 0 and free)
            found += [ForwardEnable(i)] * (free and i < self.delta)
        return found + [Loss()] * (not self.lost and self.length in here)

    def towards(self, index: int, goal: Operation) -> Operation:
        """The operation that comes nearer to having a_index, or `goal` if it is there."""
        here = self.plain | self.saved
        return goal if index in here else ForwardCheck(max(i for i in here if i < index))

    def do(self, operation: Operation) -> None:
        self.operations.append(operation)
        match operation:
            case ForwardEnable(stage):
                self.saved.add(stage + 1)
            case ForwardCheck(stage) | ForwardNograd(stage):
                self.plain.add(stage + 1)
            case Loss():
                self.lost = True
                self.plain.discard(self.length)
            case Backward(stage):
                self.saved.discard(stage + 1)
                self.delta = stage
        if isinstance(operation, ForwardNograd | Backward):
            self.plain.discard(operation.stage)
