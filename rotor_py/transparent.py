"""Wrap a module so that trainers, optimizers and checkpoint files see the module itself: class, names, attributes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rotor_profiling.isolate import set_meanwhile
from rotor_profiling.torch_compat import is_optimized
from rotor_py.errors import record_fields

_log = logging.getLogger("rotor_py")
# Names of the dictionaries that hold a module's parameters, buffers, children and hooks. Read from an empty module,
# since each release of torch may add some.
_TABLES = sorted(key for key in vars(nn.Module()) if key != "training")


class Transparent(nn.Module):
    """A module that shares the parameters, buffers, children and hooks of `model`.

    State dicts and names have no prefix. Attributes are the model's, except those that this class defines. `__class__`
    is the model's, so `isinstance` answers as for the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Share the dictionaries, so that both modules get later additions, and names get no prefix, as a child's would.
        for table in _TABLES:
            self.__dict__[table] = model.__dict__[table]
        self.__dict__["model"] = model
        self.training = model.training

    @property
    def __class__(self) -> type:
        return type(self.__dict__.get("model", self))

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self.model.__class__ = kind  # set by torch's parametrizations

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # By default, pickle reads `__class__`, which is the model's, and would load a model without this wrapper.
        return object.__new__, (type(self),), self.__dict__

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("model")
        if model is None:  # before `__init__`, or while this wrapper is unpickled
            raise AttributeError(name)
        found = getattr(model, name)
        # Methods that call `self(...)` in training, such as Lightning's `training_step`, must not bypass the plan.
        trains = self.training and torch.is_grad_enabled()
        if not trains or not isinstance(found, MethodType) or found.__self__ is not model:
            return found
        # Methods of torch do not call `self(...)`, and FSDP's need the model as `self`.
        torchs = str(getattr(found.__func__, "__module__", "")).partition(".")[0] == "torch"
        return found if torchs else MethodType(found.__func__, self)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("model")
        # Set properties on the wrapper, and `forward`, which Accelerate replaces.
        own = model is None or name in self.__dict__ or name == "forward"
        if own or hasattr(inspect.getattr_static(type(self), name, None), "__set__"):
            object.__setattr__(self, name, value)
        else:
            setattr(model, name, value)  # private attributes, too: the model's methods set and read them

    def __delattr__(self, name: str) -> None:
        model = self.__dict__.get("model")
        if model is None or name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(model, name)

    # Python looks up the following methods of an nn.Sequential on the class, without `__getattr__`.

    def __getitem__(self, index: Any) -> Any:
        return self.model[index]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        self.model[index] = module

    def __delitem__(self, index: Any) -> None:
        del self.model[index]
        self.__dict__["_modules"] = self.model._modules  # an nn.Sequential has numbered its children in a new one

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)

    def __len__(self) -> int:
        return len(self.model)

    def __bool__(self) -> bool:
        return True  # otherwise Python would ask for the length, which most models do not have

    def train(self, mode: bool = True) -> Transparent:
        """Set the training mode of the model and of this wrapper, which has a flag of its own. Return the wrapper."""
        self.model.train(mode)
        self.training = mode
        return self


def core_of(model: nn.Module) -> nn.Module:
    """Return the module to cut into stages: the one inside DistributedDataParallel and `torch.compile`, if any."""
    if isinstance(model, DistributedDataParallel):
        return core_of(model.module)
    if is_optimized(model):
        said = "write Checkpointable(model, compile=True): torch.compile around the model does not affect planned steps"
        _log.warning(said, extra=record_fields("compile_ignored"))
        return core_of(model._orig_mod)
    return model


@contextmanager
def in_training(module: Transparent) -> Iterator[None]:
    """Inside the context, put a module and its submodules in training mode, unless the module itself trains already."""
    if module.training:
        yield
        return
    modules = (module, *module.model.modules())
    with set_meanwhile(*((each, {"training": each.training}) for each in modules)):
        module.train()
        yield
