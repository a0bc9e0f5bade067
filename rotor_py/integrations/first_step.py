"""Plan a program's model in place at its first training step; the program needs no changes.

The model is the module with trainable parameters that the program calls in training mode with gradients enabled. At its
first call it is measured, under the call's autocast, and planned; that call follows the plan already.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotor_profiling import UnknownOptimizerError, optimizer_cost, tensors_in, torch_compat
from rotor_py.checkpointable import Checkpointable
from rotor_py.errors import InfeasibleError, UnsupportedModelError
from rotor_py.integrations.in_place import InPlaceForward, is_planned
from rotor_py.plan.planned_model import plan_of
from rotor_py.plan.step_spec import ForwardArguments
from rotor_py.stage.forward_state import autocast_now, restored_autocast


class NoTrainingStepError(UnsupportedModelError):
    """The program ended without a training step."""


class FirstTrainingStep:
    """Plans the model of a program run inside `watched()`; calls `found` before the optimizer's first step.

    `found` may raise an error to end the program. Otherwise the model follows its plan until `take_away()`. If no plan
    fits, `found` is called before the model runs, and InfeasibleError is raised in the program unless `found` raises.
    If it is certain before measuring that no plan fits, InfeasibleError is raised without a call of `found`.

    Args:
        found: called once, with a `FirstStep`.
        mem_limit: limit of a whole step's peak, as for `Checkpointable`.
        settings: other arguments of `Checkpointable`. `fresh_grads` is True until a forward begins with gradients.
        limited: whether to refuse, before measuring, a step that cannot fit the limit.
        closely: whether to measure times more exactly, for a search of the least limit with a given overhead.

        Plans the model with the most trained elements. Raises UnsupportedModelError if it has a plan already.
    """

    def __init__(
        self,
        found: Callable[[FirstStep], None],
        mem_limit: float | str | None,
        settings: dict[str, Any],
        *,
        limited: bool = True,
        closely: bool = False,
    ) -> None:
        self._found = found
        self._mem_limit, self._settings = mem_limit, {"fresh_grads": True, **settings}
        # Validate the arguments before the program runs.
        Checkpointable(nn.Identity(), mem_limit=mem_limit, **self._settings)
        self._limited, self._closely = limited, closely
        self._planned: FirstStep | None = None
        self._plain: dict[nn.Module, int] = {}  # number of trained elements of each called model without a plan
        self._refused: UnsupportedModelError | None = None
        self._stepped: list[torch.optim.Optimizer] = []  # optimizers of other models that have stepped
        self._over = False
        # The error that ends the program, if any: one that `found` raised, or an InfeasibleError before `found` was
        # called. The program may catch it or raise another; the caller of `watched` gets this one.
        self._ended: list[BaseException] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the program in this context. Raises NoTrainingStepError if it ends, without error, before a step."""
        # Optimizer hooks run in the order of registration. That of `undeclared_memory.py`, registered when `__init__`
        # made a `Checkpointable`, runs first, so the plan passed to `found` counts the optimizer's state.
        hook = register_optimizer_step_pre_hook(self._about_to_step)
        try:
            with outermost_calls(self._called) as self._stop:
                yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            if not self._ended:
                raise
        finally:
            hook.remove()
            ended, self._ended = self._ended, []
        if ended:
            raise ended.pop()  # no variable may keep it: its traceback would keep the program's objects alive
        if self._over:
            return
        if self._planned is not None and self._planned.went_back:
            self._show()
        elif self._refused is not None:
            raise self._refused
        elif self._planned is not None:
            name = type(self._planned.model).__name__
            said = f"it called {name}, and ended without a call of backward() that reached {name}"
            raise NoTrainingStepError(said, kind="no_backward", name=name)
        else:
            said = "it never called a model with trainable parameters in training mode with gradients enabled"
            raise NoTrainingStepError(said, kind="no_training_call")

    def take_away(self) -> None:
        """Restore the model's own forward."""
        if self._planned is not None:
            self._planned.forward.take_away()

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        if self._ended:  # the program caught the error that was to end it: raise it again
            raise self._ended[0]
        if self._over or not (module.training and torch.is_grad_enabled()):
            return run()
        planned = self._planned
        if planned is not None and planned.went_back and not is_trained(planned.model):
            self._show()  # no torch optimizer trains the model, so its step ends unseen: show it at the next call
            return run()
        if planned is None or module is not planned.model:
            size = sum(each.numel() for each in module.parameters() if each.requires_grad)
            if not size:
                return run()
            if module in self._plain or (planned is not None and size <= planned.size):
                self._plain[module] = size
                return run()
            planned = self._plan(module, ForwardArguments(args, kwargs), size)
            if planned is None:
                return run()
        else:
            planned.count_gradients()
        try:
            output = run()
        except InfeasibleError:  # this call's sample is larger than the measured one
            planned.measure(ForwardArguments(args, kwargs))
            self._show()
            raise
        planned.returned(output, ForwardArguments(args, kwargs))
        return output

    def _plan(self, module: nn.Module, sample: ForwardArguments, size: int) -> FirstStep | None:
        """Plan `module`, and end the plan of another model, if any. Return None if `module` cannot be planned."""
        if any(is_planned(each) for each in module.modules()):
            name = type(module).__name__
            message = f"{name}, or a part of it, is planned already; print(model.report()) after a step shows its plan"
            raise UnsupportedModelError(message, kind="planned_already", name=name)
        optimizer = optimizer_of(module)
        try:
            network = Checkpointable(module, mem_limit=self._mem_limit, optimizer=optimizer, **self._settings)
            if self._limited:
                network.refuse_what_cannot_fit(sample)
            network.measure(sample, closely=self._closely)
        except InfeasibleError as error:
            self._over, self._ended = True, [error]
            raise
        except UnsupportedModelError as error:
            self._refused = self._refused or error
            self._plain[module] = size
            return None
        if self._planned is not None:
            self._planned.forward.take_away()
            self._plain[self._planned.model] = self._planned.size
        self._planned = FirstStep(network, sample, size, optimizer, closely=self._closely)
        try:
            network.compute_sequence()
        except InfeasibleError:
            self._show()
            raise  # `_show` returned, so `found` has not raised an error of its own
        self._planned.forward.put()
        return self._planned

    def _about_to_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._ended:
            raise self._ended[0]
        planned = self._planned
        # An optimizer that steps inside a backward does not end the training step: other gradients are still to come.
        if self._over or planned is None or torch_compat.current_graph_task_id() != -1:
            return
        if planned.went_back and trains(optimizer, planned.model):
            self._show(optimizer)
            return
        trained = [each for each in self._plain if trains(optimizer, each)]
        if not trained:  # an optimizer of no called model, such as a copy on which optimizer memory is measured
            return
        if optimizer not in self._stepped:
            self._stepped.append(optimizer)
            return
        # Another model's optimizer steps for the second time, and the planned model has no gradient: do not plan it.
        planned.forward.take_away()
        self._plain = {planned.model: planned.size}
        self._planned = None

    def _show(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._over = True
        assert self._planned is not None
        planned = self._planned
        planned.make_room_for_forwards()
        planned.others = tuple(each for each in self._plain if is_trained(each))
        planned.optimizer = optimizer or planned.optimizer
        try:
            self._found(planned)
        except BaseException as error:
            self._ended = [error]
            raise
        self._stop()


class FirstStep:
    """A model that is planned in place, and facts about its first training step until right before `optimizer.step()`.

    `network`: the model, measured and, if a plan fits, planned. `sample`: arguments with which the program called it.
    `size`: number of trained elements. `optimizer`: trains the model; None if unknown.
    """

    def __init__(
        self,
        network: Checkpointable,
        sample: ForwardArguments,
        size: int,
        optimizer: torch.optim.Optimizer | None,
        *,
        closely: bool,
    ) -> None:
        self.network, self.model, self.sample, self.size = network, network.model, sample, size
        self.optimizer, self._closely = optimizer, closely
        self.autocast = autocast_now([network.device])  # autocast state of each device type around the call
        self.forward = InPlaceForward(network)
        self.went_back = False
        self.own_loss = False  # whether the model returned a loss: a tensor without dimensions that requires a gradient
        self.others: tuple[nn.Module, ...] = ()  # other called models that an optimizer trains; they have no plan
        self._most_in_flight = 1

    def measure(self, sample: ForwardArguments) -> None:
        self.forward.measure(sample, closely=self._closely)

    def count_gradients(self) -> None:
        """If parameters have gradients when a forward begins, measure again without `fresh_grads`."""
        if self.network.fresh_grads and any(each.grad is not None for each in self.model.parameters()):
            self.network.fresh_grads = False
            self.measure(self.sample)

    def make_room_for_forwards(self) -> None:
        """Measure again for the number of forwards in flight that the step had, if more than declared."""
        network = self.network
        if self._most_in_flight <= network.forwards_in_flight:
            return
        loss = plan_of(network).measurement.loss  # its memory, found in the step; a new measurement would lose it
        network.loss_tmp_memory_usage = loss.temp_bytes + loss.kept_bytes
        network.forwards_in_flight = self._most_in_flight
        with restored_autocast(self.autocast, cache=True):
            self.measure(self.sample)

    def returned(self, output: Any, sample: ForwardArguments) -> None:
        self.sample = sample
        tensors = [each for each in tensors_in(output) if each.requires_grad]
        self.own_loss = any(each.dim() == 0 for each in tensors)
        self._most_in_flight = max(self._most_in_flight, plan_of(self.network).most_in_flight)
        for tensor in tensors:
            tensor.register_hook(self._gradient_came)

    def _gradient_came(self, gradient: torch.Tensor) -> None:
        self.went_back = True


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return any(id(each) in trained for each in model.parameters())


def is_trained(model: nn.Module) -> bool:
    return any(trains(each, model) for each in _optimizers())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    """Return the optimizer that trains the model; None if none or several do, or its memory cannot be predicted."""
    found = [each for each in _optimizers() if trains(each, model)]
    if len(found) != 1:
        return None
    with suppress(UnknownOptimizerError):
        optimizer_cost(found[0])
        return found[0]
    return None


def _optimizers() -> list[torch.optim.Optimizer]:
    """Find all live optimizers, without Accelerate's wrappers."""
    # Not `isinstance`: reading `__class__` makes some objects import a library. Keep no reference to other objects:
    # `get_objects` returns tuples, too, that are still being built.
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [each for each in found if "param_groups" in each.__dict__]


# Called instead of a module: with the module, its arguments and keywords, and a function that makes the original call.
Handler = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


@contextmanager
def outermost_calls(handler: Handler) -> Iterator[Callable[[], None]]:
    """Within the context, call `handler` in place of modules, except inside their calls. Yields a function to stop.

    Affects only the thread that enters the context, and no calls during a backward, which are recomputations.
    """
    # Replaces `Module.__call__`, as torch's global forward hooks get no keyword arguments. TorchDynamo works only with
    # the `__call__` that it found when it was imported.
    kind: Any = nn.Module
    called, here = kind.__call__, (os.getpid(), threading.get_ident())
    inside, watching = False, True

    @wraps(called)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        elsewhere = here != (os.getpid(), threading.get_ident())
        if inside or elsewhere or torch_compat.current_graph_task_id() != -1:
            return called(self, *args, **kwargs)
        inside, kind.__call__ = True, called  # restored during the call, in which TorchDynamo may capture
        try:
            return handler(self, args, kwargs, lambda: called(self, *args, **kwargs))
        finally:
            inside, kind.__call__ = False, call if watching else called

    def stop() -> None:
        nonlocal watching
        watching, kind.__call__ = False, called

    kind.__call__ = call
    try:
        yield stop
    finally:
        stop()
