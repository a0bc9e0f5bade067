"""Divide a step's memory limit among the chain of stages, fixed memory, and other memory outside of the chain."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from rotor_profiling import OptimizerCost, storage_bytes, tensors_in, view_bytes
from rotor_profiling.attributes import left_tensors
from rotor_py.measure.fixed_memory import (
    NONE_STEPPED,
    FixedMemory,
    SteppedParameters,
    kept_gradient_bytes,
    known_memory,
    trained_bytes,
    unaccounted_bytes,
    unsplit_bytes,
)
from rotor_py.measure.measurement import Measurement
from rotor_py.units import exact_bytes, format_bytes, limit_text
from rotor_solver import (
    Algorithm,
    Backward,
    Chain,
    InfeasibleError,
    Loss,
    Option,
    Persistent,
    RecomputeAll,
    Sequence,
    StoreAll,
    recompute_all,
    simulate,
    solve_in_flight,
    store_all,
)
from rotor_solver.in_flight import Footprint, busiest_of, least_in_flight_sequence, most_while_one_begins, peaks_of
from rotor_solver.offload import Link, simulate_moves, solve_moving

# Least share of time that different sequences for the forwards in flight must save; else, all follow the same sequence.
# A guess, not above the share by which the solver's sequences may be slower than the best.
_WORTH = 0.005
# Link whose bytes per second are so few that every copy ends only when the sequence waits for it.
_SLOWEST = Link(1e-9, 1e-9)


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a step: predicts its peak under a sequence, and finds a sequence within a limit.

    In addition to the fixed memory, a step takes `before_bytes` while the layers before the chain run, and
    `stepping_bytes` while the optimizer steps: the chain's input and output, and gradients that are freed between
    steps. The optimizer's step takes `step_bytes` more (None if unknown). `snapshot_bytes` are in memory throughout a
    step that recomputes any stage.

    `forwards` is the number of forwards that run before the first backward; their backwards come in `backward_order`,
    one of `rotor_solver.in_flight.ORDERS`. A sequence is that of the first forward, and contains those of the others
    (`Sequence.of_forwards`). Until its backward, a forward keeps its chain's saved bytes, `held_beside` bytes outside
    of the chain, and its own snapshots in memory.
    """

    fixed: FixedMemory
    chain: Chain
    before_bytes: int = 0
    snapshot_bytes: int = 0
    stepping_bytes: int = 0
    step_bytes: int | None = None
    forwards: int = 1
    held_beside: int = 0
    backward_order: str = "any"
    in_nodes: bool = False
    """Whether each stage runs as a custom autograd node; see the function `in_nodes`."""
    freed_gradients: int = 0
    """Bytes of gradients that are freed in the backward, each as soon as the optimizer has stepped its parameter."""
    view_bytes: int = 0
    """Bytes of one forward's input; if it is a view, without the rest of the viewed tensor."""
    rest_bytes: int = 0
    """Bytes of the rest of a batch of which the input is a view, as a microbatch is."""
    link: Link | None = None
    """Bytes per second at which tensors are offloaded and fetched; None if no tensor may be offloaded."""
    link_name: str = ""
    """Value of `offload`: the memory or the folder to which tensors are offloaded."""

    @property
    def optimizer_peak_bytes(self) -> int:
        """Bytes in memory while the optimizer steps; without the temporary ones of its step if these are unknown."""
        return self.fixed.total + self.stepping_bytes + (self.step_bytes or 0)

    def peak_bytes(self, sequence: Sequence) -> int:
        """Return the predicted peak of a whole step under `sequence`."""
        if self.forwards == 1:
            before, running = self.fixed.total, self.beside_chain(sequence) + peak_of(self.chain, sequence)
        else:
            forwards = self.footprints(sequence)
            before = self.fixed.total - self.held_beside + most_while_one_begins(forwards, self.backward_order)
            running = self.bytes_together(forwards)
        return max(before + self.before_bytes, self.optimizer_peak_bytes, running)

    def beside_chain(self, sequence: Sequence) -> int:
        """Return the bytes outside the `busiest` forward's chain: fixed, its snapshots, and those of other forwards."""
        return self.busiest(sequence)[1]

    def busiest(self, sequence: Sequence) -> tuple[Sequence, int]:
        """Return the sequence of the forward during which the step peaks, and the bytes outside of its chain then."""
        if self.forwards == 1:
            return sequence, self.fixed.total + self._snapshot(sequence)
        number, others = busiest_of(self.footprints(sequence), self.backward_order)
        chosen = sequence.of_forwards(self.forwards)[number]
        return chosen, self.fixed.total + others + self._snapshot(chosen)

    def makespan(self, sequence: Sequence) -> float:
        """Return the seconds of all forwards in flight, of their losses and of their backwards."""
        if sequence.moves is not None:
            assert self.link is not None
            # Every forward in flight follows this sequence.
            return self.forwards * simulate_moves(self.chain, sequence, sequence.moves, self.link).makespan
        return sum(simulate(self.chain, each).makespan for each in sequence.of_forwards(self.forwards))

    def moved_bytes(self, sequence: Sequence) -> int:
        if sequence.moves is None:
            return 0
        return self.forwards * simulate_moves(self.chain, sequence, sequence.moves, _SLOWEST).moved

    def footprints(self, sequence: Sequence) -> list[Footprint]:
        """Return, for each forward in flight, the bytes that it takes in and outside of its chain, and its seconds."""
        return [self.footprint(each) for each in sequence.of_forwards(self.forwards)]

    def footprint(self, sequence: Sequence) -> Footprint:
        found, more = Footprint.of(self.chain, sequence), self.held_beside + self._snapshot(sequence)
        return replace(found, kept=found.kept + more, left=found.left + more, peak=found.peak + more)

    def bytes_together(self, forwards: list[Footprint]) -> int:
        """Return the peak bytes of a step with these forwards in flight."""
        return self.fixed.total - self.held_beside + max(peaks_of(forwards, self.backward_order))

    def _snapshot(self, sequence: Sequence) -> int:
        return self.snapshot_bytes if recomputes(sequence) else 0

    def chain_limit(self, mem_limit: int) -> int:
        """Return the bytes left for the chains of all forwards, inputs included, if the plan recomputes any stage."""
        others = (self.forwards - 1) * (self.held_beside + self.snapshot_bytes)
        return mem_limit - self.fixed.total - self.snapshot_bytes - others

    def split(self) -> str:
        parts = self.fixed.in_words()
        forwards = f" with {self.forwards} forwards in flight" if self.forwards > 1 else ""
        forwards += " whose backwards come in reverse" if forwards and self.backward_order == "reverse" else ""
        freed = f"; {self.gradients_freed()}" if self.freed_gradients else ""
        return f"{format_bytes(self.fixed.total)} is fixed" + (f" ({parts})" if parts else "") + forwards + freed

    def gradients_freed(self) -> str:
        return f"{format_bytes(self.freed_gradients)} of gradients are freed in the backward, which steps parameters"

    def moved_in_words(self, sequence: Sequence) -> str:
        """Return a text with the bytes that `sequence` offloads; empty if no tensor may be offloaded."""
        if self.link is None:
            return ""
        if nbytes := self.moved_bytes(sequence):
            return f"{format_bytes(nbytes)} of activations are moved to {self.link_name} and back"
        return f"nothing is moved to {self.link_name}: no plan within the limit would be faster for it"

    def with_forwards(self, forwards: int, measurement: Measurement, gradient_bytes: int) -> Budget:
        """Return the budget for `forwards` in flight, if their first backward makes `gradient_bytes`, which stay."""
        if forwards == self.forwards:
            return self
        return replace(
            self,
            fixed=replace(
                self.fixed,
                gradients=self.fixed.gradients + (gradient_bytes if self.forwards == 1 else 0),
                batch=self.fixed.batch + self._covered(self.forwards) - self._covered(forwards),
            ),
            chain=self._chain(measurement, fresh_gradients=False, forwards=forwards),
            stepping_bytes=forwards * (measurement.input_bytes + measurement.output_bytes),
            forwards=forwards,
            held_beside=self._held_beside(measurement),
        )

    def _chain(self, measurement: Measurement, *, fresh_gradients: bool, forwards: int = 1) -> Chain:
        chain = measurement.chain(fresh_gradients=fresh_gradients, forwards=forwards)
        return in_nodes(chain) if self.in_nodes else chain

    def _held_beside(self, measurement: Measurement) -> int:
        loss, carried = measurement.loss, sum(each.nbytes for each in measurement.carried)
        # Count all temporary bytes of the loss: how many of them stay until its backward is unknown.
        held = measurement.held_bytes if measurement.outputs_held else 0
        batch = self.view_bytes if measurement.prefix else 0
        return batch + carried + held + measurement.left_bytes + loss.kept_bytes + loss.temp_bytes

    def _covered(self, forwards: int) -> int:
        return min(self.rest_bytes, (forwards - 1) * self.view_bytes)

    def least_bytes(self) -> int:
        """Return the least limit, in bytes, for which there is a plan."""
        # Storing everything may need least memory: the snapshots of a plan that recomputes may take more than it saves.
        return min(self.peak_bytes(store_all(self.chain)), self.peak_bytes(self._least_sequence()))

    def _least_sequence(self) -> Sequence:
        if self.forwards == 1:
            return recompute_all(self.chain)
        return least_in_flight_sequence(self.chain, self.forwards, self.backward_order)

    def solve(self, mem_limit: int, algorithm: Algorithm) -> Sequence:
        """Return a sequence with which a whole step takes at most `mem_limit` bytes.

        Raises InfeasibleError if there is none, with the least limit that works as `min_bytes`, and ValueError if
        `algorithm` cannot solve this chain.
        """
        stored = store_all(self.chain)
        # Try to store everything first: this needs no snapshots, which `chain_limit` subtracts. But if the caller has
        # chosen another algorithm than the default, return that algorithm's sequence.
        if isinstance(algorithm, Persistent) and self.peak_bytes(stored) <= mem_limit:
            return StoreAll().solve(self.chain, simulate(self.chain, stored).peak)
        if mem_limit < self.least_bytes():
            raise self.refuse(mem_limit)
        if self.forwards == 1 and isinstance(algorithm, Persistent):
            # The sequence of least memory may store every stage, some in part, and then needs no snapshots, either.
            least = simulate(self.chain, recompute_all(self.chain)).peak
            if self.chain_limit(mem_limit) < least:
                return RecomputeAll().solve(self.chain, least)
        if self.forwards == 1 and self.link is not None and isinstance(algorithm, Persistent):
            found = solve_moving(self.chain, self.chain_limit(mem_limit), self.link, algorithm.slots)
            sequence = replace(found.sequence, moves=found.moves) if found.moves.stages else found.sequence
        elif self.forwards == 1:
            sequence = algorithm.solve(self.chain, self.chain_limit(mem_limit))
        else:
            sequence = self._solve_for_all(mem_limit, algorithm)
        assert self.peak_bytes(sequence) <= mem_limit
        return sequence

    def _solve_for_all(self, mem_limit: int, algorithm: Algorithm) -> Sequence:
        limit, order = self.chain_limit(mem_limit), self.backward_order
        if isinstance(algorithm, Persistent):
            flying = solve_in_flight(self.chain, limit, self.forwards, order, worth=_WORTH, slots=algorithm.slots)
            return flying.sequence
        # Other algorithms take a limit for one forward. Bisect for the largest one at which all forwards fit together.
        little, much, found = 0, limit + 1, None
        while much - little > 1:
            middle = (little + much) // 2
            try:
                sequence = algorithm.solve(self.chain, middle)
            except InfeasibleError:
                little = middle
                continue
            if self.peak_bytes(sequence) <= mem_limit:
                little, found = middle, sequence
            else:
                much = middle
        return self._least_sequence() if found is None else found

    def refuse(self, mem_limit: int, remedy: str = "") -> InfeasibleError:
        """Return the error for a limit that is too small; its message has the sentence `remedy` before others."""
        # accelerate's `find_executable_batch_size` looks for "out of memory" in messages.
        least = self.least_bytes()
        largest = max(range(len(self.chain.stages)), key=lambda i: self.chain.stages[i].options[0].saved, default=None)
        needs = ""
        if largest is not None:
            stage = self.chain.stages[largest]
            needs = f" Stage {stage.name} alone keeps {format_bytes(stage.options[0].saved)} for its backward."
        message = (
            f"a training step needs at least {exact_bytes(least)}, of which {self.split()}; the limit is "
            f"{exact_bytes(mem_limit)}, so it would run out of memory.{needs}{remedy and ' '}{remedy} Try a smaller "
            f"batch, or a limit of {limit_text(least)}."
        )
        return InfeasibleError(message, min_bytes=least, mem_limit=mem_limit, stage=largest)

    def with_fresh_gradients(self, measurement: Measurement, gradient_bytes: int) -> Budget:
        """Return the budget of this step if its gradients, `gradient_bytes` in all, are freed between steps."""
        if self.forwards > 1:  # gradients of the first backward stay in memory during the other backwards
            return self
        return replace(
            self,
            fixed=replace(self.fixed, gradients=max(0, self.fixed.gradients - gradient_bytes)),
            chain=self._chain(measurement, fresh_gradients=True),
            stepping_bytes=self.stepping_bytes + gradient_bytes,
        )

    def with_communication(self, size: int) -> Budget:
        return replace(self, fixed=replace(self.fixed, communication=size))

    def with_gradients_of(
        self, model: nn.Module, device: torch.device, *, fresh: bool, stepped: SteppedParameters = NONE_STEPPED
    ) -> Budget:
        """Return this budget with fixed gradients of at least the bytes that `kept_gradient_bytes` finds now."""
        waiting = trained_bytes(model, device) if self.forwards > 1 else 0
        kept = waiting + kept_gradient_bytes(model, device, fresh=fresh, stepped=stepped)
        return replace(self, fixed=replace(self.fixed, gradients=max(self.fixed.gradients, kept)))

    def with_found(self, measurement: Measurement, more_bytes: int, *, fresh_gradients: bool) -> Budget:
        """Return this budget with the chain of `measurement`, and with `more_bytes` more of fixed memory."""
        fixed = replace(self.fixed, other=self.fixed.other + more_bytes)
        beside = self._held_beside(measurement) if self.forwards > 1 else self.held_beside
        chain = self._chain(measurement, fresh_gradients=fresh_gradients, forwards=self.forwards)
        return replace(self, fixed=fixed, held_beside=beside, chain=chain)

    def with_outputs_held(self, before: Measurement, measurement: Measurement, *, fresh_gradients: bool) -> Budget:
        """Return this budget for `measurement`, which differs from `before` only in which outputs the caller keeps."""
        more = measurement.returned_bytes - before.returned_bytes
        found = self.with_found(measurement, more, fresh_gradients=fresh_gradients)
        more = self.forwards * (measurement.output_bytes - before.output_bytes)
        return replace(found, stepping_bytes=self.stepping_bytes + more)


def in_nodes(chain: Chain) -> Chain:
    """Return the chain for stages that run as custom autograd nodes, each with a graph separate from the caller's."""

    def in_node(option: Option) -> Option:
        # In a node, a stored stage has a graph of its own, as if recomputed, but an output, too: take the larger bytes.
        return replace(option, backward_temp=max(option.backward_temp, option.backward_temp_of_replay))

    stages = (replace(stage, options=tuple(map(in_node, stage.options))) for stage in chain)
    return replace(chain, stages=tuple(stages))


def make_budget(
    model: nn.Module,
    sample: object,
    measurement: Measurement,
    device: torch.device,
    *,
    fresh_gradients: bool,
    optimizer: OptimizerCost | None,
    communication: int = 0,
    buckets: bool = False,
    stepped: SteppedParameters = NONE_STEPPED,
) -> Budget:
    """Return the budget of a step of `model` on `sample`.

    `optimizer`: cost for the parameters that are not `stepped` in the backward; None if unknown. `buckets`: whether the
    bytes for `communication` are allocated before the step, as DistributedDataParallel's buckets are.
    """
    known = known_memory(model, sample, device, fresh_gradients=fresh_gradients, optimizer=optimizer, stepped=stepped)
    left = storage_bytes(each for each in left_tensors(model) if each.device == device) if measurement.left_bytes else 0
    accounted = known.parameters + known.buffers + known.batch + left + (communication if buckets else 0)
    view = min(known.batch, view_bytes(tensor for tensor in tensors_in(sample) if tensor.device == device))
    fixed = replace(
        known,
        communication=communication,
        batch=known.batch if measurement.prefix else known.batch - view,
        other=measurement.loss.kept_bytes
        + measurement.returned_bytes
        + measurement.left_bytes
        + unsplit_bytes(device, sum(stage.saved_bytes for stage in measurement.stages))
        + unaccounted_bytes(device, list(model.parameters()), accounted, optimizer),
    )
    # The caller keeps the batch and the output until the step ends, so they are in memory while the optimizer steps.
    prefix = measurement.prefix
    fresh = trained_bytes(model, device, stepped) if fresh_gradients else 0
    return Budget(
        fixed=fixed,
        chain=measurement.chain(fresh_gradients=fresh_gradients),
        before_bytes=measurement.input_bytes + (prefix.temp_bytes if prefix else 0),
        snapshot_bytes=measurement.snapshot_bytes,
        stepping_bytes=measurement.input_bytes + measurement.output_bytes + fresh,
        step_bytes=optimizer.step_bytes if optimizer else None,
        view_bytes=view,
        rest_bytes=known.batch - view,
        freed_gradients=trained_bytes(model, device) - trained_bytes(model, device, stepped),
    )


def peak_of(chain: Chain, sequence: Sequence) -> int:
    """Return the peak bytes of `sequence`, offloading included."""
    if sequence.moves is None:
        return simulate(chain, sequence).peak
    # Assume the slowest link: on any link, the tape frees an offloaded storage only when it waits for the copy.
    return simulate_moves(chain, sequence, sequence.moves, _SLOWEST).peak


def recomputes(sequence: Sequence) -> bool:
    """Whether `sequence` recomputes any stage: runs its forward after the loss."""
    return any(not isinstance(operation, Backward) for operation in sequence[sequence.index(Loss()) + 1 :])
