"""A module that stands in for another one, and looks like it from the outside.

Trainers, optimizers and checkpoint files know the model by its class, its signature, its names and its attributes. If
one of them differed, code that works with the model would need to know that it is wrapped.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling.torch_classes import is_optimized
from rotor_py.errors import record_fields

_log = logging.getLogger("rotor_py")
# Read from an empty module, because torch has added tables from one release to the next.
_TABLES = sorted(key for key in vars(nn.Module()) if key != "training")
"""The dictionaries in which a module has its parameters, buffers, children and hooks."""


class ModelsSignature:
    """A method that shows the signature of the model's method of the same name.

    Trainers read the signature of `forward` to see which columns of a data set a model takes, and whether its loss
    takes keyword arguments.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._signed: WeakKeyDictionary[type, Callable[..., Any]] = WeakKeyDictionary()

    def __get__(self, instance: Transparent | None, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._method
        return MethodType(self._like(type(instance.__dict__["model"])), instance)

    def _like(self, kind: type) -> Callable[..., Any]:
        if kind not in self._signed:  # one function for one class of models, so that methods compare equal
            method = self._method

            def signed(*args: Any, **kwargs: Any) -> Any:
                return method(*args, **kwargs)

            signed.__name__, signed.__qualname__, signed.__doc__ = method.__name__, method.__qualname__, method.__doc__
            with suppress(AttributeError, TypeError, ValueError):  # methods written in C may have no signature
                signed.__signature__ = inspect.signature(getattr(kind, method.__name__))  # type: ignore[attr-defined] # read by inspect
            self._signed[kind] = signed
        return self._signed[kind]


class Transparent(nn.Module):
    """Shares the parameters, buffers, children and hooks of `model`.

    State dicts and names are those of the model, without a prefix. So are attributes, except those that the class
    defines. `isinstance` answers as it does for the model, since `__class__` is the model's.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # The same dictionaries, not copies: what is added to the model later is seen here, and the other way round. If
        # the model were a child instead, every name would get a prefix.
        for table in _TABLES:
            self.__dict__[table] = model.__dict__[table]
        self.__dict__["model"] = model
        self.training = model.training

    @property
    def __class__(self) -> type:
        return type(self.__dict__.get("model", self))

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self.model.__class__ = kind  # as torch's parametrizations do

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle's own way asks for `__class__`, and would make a model without this module around it.
        return _blank, (type(self),), self.__dict__

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("model")
        if model is None:  # before `__init__`, or while it is unpickled
            raise AttributeError(name)
        found = getattr(model, name)
        # A method that calls `self(...)` while it trains, as a LightningModule's `training_step` does, has to call this
        # module: the model's own forward would not follow the plan, and nobody would notice.
        trains = self.training and torch.is_grad_enabled()
        if trains and isinstance(found, MethodType) and found.__self__ is model and not _is_torchs(found):
            return MethodType(found.__func__, self)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("model")
        if model is None or name in self.__dict__ or _is_own(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(model, name, value)  # private ones too: the model's methods set them, and its forward reads them

    def __delattr__(self, name: str) -> None:
        model = self.__dict__.get("model")
        if model is None or name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(model, name)

    # Python looks these up on the class, and does not ask `__getattr__`. An nn.Sequential has them.

    def __getitem__(self, index: Any) -> Any:
        return self.model[index]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        self.model[index] = module

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)

    def __len__(self) -> int:
        return len(self.model)

    def __bool__(self) -> bool:
        return True  # otherwise Python would ask for the length, which most models do not have

    def train(self, mode: bool = True) -> Transparent:
        """Set the mode of the model and of this module, which has a flag of its own. Returns itself."""
        self.model.train(mode)
        self.training = mode
        return self


def _is_own(kind: type, name: str) -> bool:
    """Whether setting an attribute is for the wrapper: a property or another descriptor of its class, and `forward`.

    Properties that cannot be set are among them: put on the model, the value would not be found when it is read here.
    Libraries that wrap a forward (Accelerate does) put it on what they were given, and mean that to call it.
    """
    return hasattr(inspect.getattr_static(kind, name, None), "__set__") or name == "forward"


def _is_torchs(method: MethodType) -> bool:
    """Whether torch defines a method: those of FSDP look their module up by identity, and none calls `self(...)`."""
    return str(getattr(method.__func__, "__module__", "")).partition(".")[0] == "torch"


def _blank(kind: type[Transparent]) -> Transparent:
    return kind.__new__(kind)


def core_of(model: nn.Module) -> nn.Module:
    """The model inside wrappers that distribute or compile it: what can be cut into stages."""
    if isinstance(model, DistributedDataParallel):
        return core_of(model.module)
    if is_optimized(model):
        _log.warning(
            "torch.compile around the whole model has no part in a planned step; to compile what is planned, write "
            "Checkpointable(model, compile=True)",
            extra=record_fields("compile_ignored"),
        )
        return core_of(model._orig_mod)
    return model


@contextmanager
def in_training(module: Transparent) -> Iterator[None]:
    """Have a module in training mode inside the context.

    One that is in training mode is left alone: parts of it, such as frozen norms, may be in eval mode on purpose.
    """
    if module.training:
        yield
        return
    # `train()` goes to all parts, so the mode of each is put back, not that of the whole.
    modes = [(each, each.training) for each in module.model.modules()]
    module.train()
    try:
        yield
    finally:
        module.training = False
        for each, mode in modes:
            each.training = mode


@contextmanager
def instead_of_forward(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Inside the context, have a call of `module` run `run` instead of its forward; inside `run` it has its own again.

    DistributedDataParallel prepares gradient buckets around the forward of the model in it. So it is what has to be
    called, and the model in it runs by the plan.
    """

    def once(*args: Any, **kwargs: Any) -> Any:
        del module.__dict__["forward"]
        return run(*args, **kwargs)

    module.__dict__["forward"] = once
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
