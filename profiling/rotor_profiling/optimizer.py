"""Find the bytes of an optimizer's state and of its step: a copy of the optimizer steps meta tensors or zeros."""

from __future__ import annotations

import copy
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from rotor_profiling.backends import prediction
from rotor_profiling.followed_storages import LiveBytes, Touched
from rotor_profiling.isolate import RandomState, accelerators, set_meanwhile, undoing
from rotor_profiling.memory import CpuMeter
from rotor_profiling.storage import bytes_like, has_values, tensors_in
from rotor_profiling.torch_compat import tree_map_only, unset_fake_temporarily
from rotor_profiling.value_tree import tree_flatten
from rotor_solver.described_error import DescribedError

# Bytes of tensors that operators make from Python scalars, which dispatch modes do not see. A guess: eight tensors of
# eight bytes; if a step makes more, its bytes are underestimated by the difference.
_SCALARS = 64


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """Bytes of an optimizer's state in training (`state_bytes`), and of the state that exists now (`present_bytes`).

    Once the state exists, `step()` temporarily allocates `step_bytes` more.
    """

    state_bytes: int
    step_bytes: int
    present_bytes: int = 0


def together(costs: Iterable[OptimizerCost]) -> OptimizerCost:
    """Return the joint cost of optimizers that step one after the other. Raises ValueError if there are none."""
    costs = list(costs)
    return OptimizerCost(
        sum(cost.state_bytes for cost in costs),
        max(cost.step_bytes for cost in costs),
        sum(cost.present_bytes for cost in costs),
    )


class UnknownOptimizerError(DescribedError, ValueError):
    """Raised if the memory of an optimizer cannot be found without training."""


Groups = list[dict[str, Any]]


def optimizer_cost(optimizer: torch.optim.Optimizer, groups: Groups | None = None) -> OptimizerCost:
    """Return the bytes that `optimizer` has in training, even if it has not stepped yet and so has no state.

    A copy of the optimizer takes two steps: the first creates its state, the second shows the memory of a later step.
    The copy steps meta tensors. If that raises, as where `step` reads values, a copy steps zeros on the CPU, one
    parameter at a time. `groups` replace its parameter groups. Raises UnknownOptimizerError if no copy can step.
    """
    groups = optimizer.param_groups if groups is None else groups
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # If parameters are on CPU and CUDA, plans are for the scarcer memory of CUDA.
    kind = "cuda" if "cuda" in devices else "cpu"
    if (predicted := prediction()) is not None:
        kind = predicted.kind
    # Remove gradients, so that a copy that still refers to the real parameters steps none. If Ctrl-C interrupts a
    # context, the first one undoes the rest.
    without = [(parameter, {"grad": None}) for group in groups for parameter in group["params"]]
    with undoing(), set_meanwhile(*without), undoing() as undo:
        present = accelerators(each.device for group in groups for each in group["params"] if has_values(each))
        undo.append(RandomState.now(present).restore)
        undo += [partial(random.setstate, random.getstate()), partial(np.random.set_state, np.random.get_state())]
        try:
            state, step = _on_meta(optimizer, groups, kind)
        except Exception:  # user code may raise anything, and a step on zeros may work
            try:
                sparse = isinstance(optimizer, torch.optim.SparseAdam)  # takes no dense gradients, unlike others
                state, step = _on_zeros(optimizer, groups, kind, sparse=sparse)
            except Exception as error:
                name = type(optimizer).__name__
                message = (
                    f"plan without the optimizer, and leave room for its state: {name}'s state is unknown ({error})"
                )
                raise UnknownOptimizerError(message, kind="unknown_optimizer", name=name) from error
        if kind == "cpu":
            step = max(step, _fused_step(optimizer, groups))
    state += bytes_like(_idle_state(optimizer, devices), kind)
    return OptimizerCost(state, step, present_bytes=_state_bytes(optimizer, devices))


def _idle_state(optimizer: torch.optim.Optimizer, kinds: set[str]) -> list[torch.Tensor]:
    """Return the state tensors of parameters that `optimizer` steps no more, as they are frozen or were replaced."""
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    entries = [item for each in with_inner(optimizer) for item in each.state.items()]
    idle = tensors_in([value for key, value in entries if isinstance(key, torch.Tensor) and id(key) not in stepped])
    return list({id(each): each for each in idle if each.device.type in kinds}.values())


def _fused_step(optimizer: torch.optim.Optimizer, groups: Groups) -> int:
    # A `fused` CPU step copies non-contiguous parameters (`channels_last`) one by one, so measure the largest of them.
    most = 0
    for group in groups if prediction() is None else ():
        strided = [each for each in group["params"] if each.requires_grad and not each.is_contiguous()]
        if not group.get("fused") or not strided:
            continue
        largest = max(strided, key=lambda each: each.numel() * each.element_size())
        alone = [{**group, "params": [largest]}]
        twin = _twin(optimizer, alone, lambda parameter: torch.zeros_like(parameter), fused=True)
        most = max(most, _second_step(twin))
    return most


def _on_meta(optimizer: torch.optim.Optimizer, groups: Groups, kind: str) -> tuple[int, int]:
    twin = _twin(optimizer, groups, lambda each: torch.empty_like(each, device="meta"), foreach=kind == "cuda")
    kinds = {"meta", kind}  # some optimizers create state on a device that they name
    live = LiveBytes(kinds, kind)
    with live:
        _step(twin)
        live.reset()
        _step(twin)
    # Step counters that a `fused` or `capturable` optimizer has on CUDA, but `twin` on the CPU.
    counters = [
        tensor
        for group, stand_ins in zip(groups, twin.param_groups, strict=True)
        if kind == "cuda" and (group.get("fused") or group.get("capturable"))
        for stand_in in stand_ins["params"]
        for tensor in tensors_in(list(twin.state[stand_in].values()))
        if tensor.device.type == "cpu"
    ]
    return _state_bytes(twin, kinds, kind) + bytes_like(counters, kind), live.peak + _SCALARS


def _on_zeros(optimizer: torch.optim.Optimizer, groups: Groups, kind: str, *, sparse: bool) -> tuple[int, int]:
    state = step = 0
    for group in groups:
        for parameter in group["params"]:
            with unset_fake_temporarily():  # the step reads values, which only real tensors have
                twin = _twin(optimizer, [{**group, "params": [parameter]}], _zeros)
                for each in twin.param_groups[0]["params"] if sparse else ():
                    row = torch.zeros((1, 1), dtype=torch.long)
                    each.grad = torch.sparse_coo_tensor(row, each.grad[:1], each.shape, check_invariants=False)
                step = max(step, _second_step(twin))  # measured on the CPU, where all zeros are
            state += _state_bytes(twin, {"cpu"}, kind)
    return state, step


def _second_step(twin: torch.optim.Optimizer) -> int:
    _step(twin)
    with CpuMeter() as meter:
        _step(twin)
    return meter.phases[""].peak


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.zeros_like(tensor, device="cpu") if has_values(tensor) else torch.zeros(tensor.shape, dtype=tensor.dtype)
    )


def _step(twin: torch.optim.Optimizer) -> None:
    # Calls the class's `step` without hooks: schedulers replace `step` on the instance by one bound to the original.
    step = plain_step(type(twin))
    closure = inspect.signature(step).parameters.get("closure")
    parameters = [parameter for group in twin.param_groups for parameter in group["params"]]
    with Touched(parameters) as touched:
        if closure is None or closure.default is not closure.empty:
            step(twin)
        elif isinstance(twin, torch.optim.LBFGS):  # with zero gradients, its step would end at once, without a state
            raise NotImplementedError("the history of LBFGS grows with the steps of each search")
        else:
            step(twin, lambda: 0.0)
    if parameters and not touched.found:
        raise NotImplementedError("a copy of the optimizer steps no parameter")


def _state_bytes(optimizer: torch.optim.Optimizer, kinds: set[str], kind: str | None = None) -> int:
    """Return the bytes on devices `kinds` of the state and attributes of an optimizer and of those that it wraps."""
    known: set[int] = set()
    kept: dict[int, torch.Tensor] = {}
    for each in with_inner(optimizer):
        for parameter in (one for group in each.param_groups for one in group["params"]):
            known |= {id(parameter), id(parameter.grad)}
        kept |= {id(tensor): tensor for tensor in tensors_in([*each.state.values(), *_own(each).values()])}
    return bytes_like((kept[at] for at in kept.keys() - known if kept[at].device.type in kinds), kind)


_INHERITED = frozenset({"state", "param_groups", "defaults", "step"})


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that `copy.copy` loses, except torch's hooks."""
    return {name: value for name, value in vars(optimizer).items() if name not in _INHERITED and "hook" not in name}


def _found_in(own: dict[str, Any], kind: type) -> list[Any]:
    return [each for each in tree_flatten(list(own.values()), kind)[0] if isinstance(each, kind)]


def with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and the optimizers that it wraps, each once even if they refer to each other."""
    found = [optimizer]
    for each in found:  # grows while it is iterated
        found += [one for one in _found_in(_own(each), torch.optim.Optimizer) if not any(one is seen for seen in found)]
    return found


def _twin(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    make: Callable[[torch.Tensor], torch.Tensor],
    *,
    foreach: bool = False,
    fused: bool = False,
) -> torch.optim.Optimizer:
    # The constructor's arguments are unknown: use `copy.copy`. It drops hooks, and attributes, which are copied below.
    parameters = [parameter for group in groups for parameter in group["params"]]
    stand_ins: dict[int, Any] = {id(p): _stand_in(make(p)) for p in parameters if p.requires_grad}
    twins = {id(each): copy.copy(each) for each in with_inner(optimizer)}
    copies = {**stand_ins, **twins}
    for each in with_inner(optimizer):
        twin, own = twins[id(each)], _own(each)
        for tensor in tensors_in(list(own.values())):
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone() if tensor.numel() == 1 else make(tensor)
        # The copy lacks models and attributes that cannot be copied, such as locks: a step that needs these raises.
        copies |= {id(each): torch.nn.Module() for each in _found_in(own, torch.nn.Module)}
        for name, value in own.items():
            with suppress(Exception):
                vars(twin)[name] = copy.deepcopy(value, copies)
        twin.state = defaultdict(dict)
        for parameter in parameters:
            if parameter in each.state and parameter.requires_grad:
                # Tensors with one element keep their value: an optimizer reads its step count.
                twin.state[stand_ins[id(parameter)]] = tree_map_only(
                    torch.Tensor, lambda t: t.clone() if t.numel() == 1 else make(t), each.state[parameter]
                )
        stepped = groups if each is optimizer else each.param_groups
        twin.param_groups = [_of_stand_ins(group, stand_ins, foreach=foreach, fused=fused) for group in stepped]
    return twins[id(optimizer)]


def _of_stand_ins(group: dict[str, Any], stand_ins: dict[int, Any], *, foreach: bool, fused: bool) -> dict[str, Any]:
    group = dict(group, params=[stand_ins[id(each)] for each in group["params"] if id(each) in stand_ins])
    # By default, torch uses `foreach`, which needs more memory, for CUDA tensors but not for meta tensors.
    if foreach and _left_to_torch(group):
        group["foreach"] = True
    for on_devices in ("fused", "capturable"):  # both raise for meta tensors
        if group.get(on_devices) and not (fused and on_devices == "fused"):
            group[on_devices] = False
    return group


def _left_to_torch(group: dict[str, Any]) -> bool:
    return group.get("foreach", False) is None and not group.get("fused")


@contextmanager
def stepping_as_on_cuda(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """If CUDA is predicted, have an optimizer of fake CPU tensors use `foreach` inside this context, as on CUDA."""
    predicted = prediction()
    on_cuda = predicted is not None and predicted.kind == "cuda"
    groups = [group for group in optimizer.param_groups if on_cuda and _left_to_torch(group)]
    with undoing() as undo:
        for group in groups:
            undo.append(partial(group.__setitem__, "foreach", None))
            group["foreach"] = True
        yield


def _stand_in(tensor: torch.Tensor) -> torch.nn.Parameter:
    twin = torch.nn.Parameter(tensor)
    twin.grad = torch.zeros_like(twin)
    return twin


# Optimizers of torch.optim that access only a parameter, its gradient, its state and its group's settings: stepping
# parameters one by one gives the same values as a joint step. SparseAdam is missing: it takes sparse gradients only.
_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip


def steps_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` has a class in `_NAMES` and torch's `step`, which steps each parameter by itself."""
    known = [getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name)]  # Muon: since torch 2.9
    mine = plain_step(type(optimizer))
    return any(isinstance(optimizer, kind) and mine is plain_step(kind) for kind in known)


def plain_step(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the `step` of an optimizer class without torch's wrapper for hooks and profiling."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def scratch_alone(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Map the id of each parameter that requires a gradient to the temporary bytes of a step of this parameter alone.

    The optimizer's state counts as allocated before. Raises UnknownOptimizerError if the bytes cannot be found.
    """
    found: dict[int, int] = {}
    known: dict[Any, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            kind = number, tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device
            if kind not in known:
                known[kind] = optimizer_cost(optimizer, [{**group, "params": [parameter]}]).step_bytes
            found[id(parameter)] = known[kind]
    return found


def step_bytes_without(optimizer: torch.optim.Optimizer, apart: set[int]) -> int:
    """Return the temporary bytes of a step without the parameters with ids in `apart`; raise as `optimizer_cost`."""
    groups = [
        {**group, "params": [each for each in group["params"] if each.requires_grad and id(each) not in apart]}
        for group in optimizer.param_groups
    ]
    left = [group for group in groups if group["params"]]
    return optimizer_cost(optimizer, left).step_bytes if left else 0
