"""Checkpointing by level: the higher the level, from 0 to 5, the larger the modules that the backward recomputes whole.

`assign_levels` derives a module's level from the levels of its submodules and from whether they repeat. The name of the
module decides where these do not: an attention may contain blocks as a layer does, an encoder may be a list of layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_py.errors import InvalidValueError

# Maps each level to the parts of a model that the backward recomputes as a whole.
LEVELS = {
    0: "none",
    1: "single layers: linear plus activation, convolution plus dropout",
    2: "small blocks: residual, attention, MLP",
    3: "layers of a transformer, blocks of a decoder",
    4: "groups or stages of layers",
    5: "whole encoders or decoders",
}


class ActivationCheckpointing(nn.Module):
    """Calls a function, and checkpoints it if its level is at most the training level: for levels in a model's code.

    `ActivationCheckpointing(3, level)(block, x)` returns `block(x)`. In training mode, if the training level `level` is
    3 or more, the forward stores only `x`, and the backward recomputes `block` from `x`. A function of level 0 is not
    checkpointed at any training level. At training level 3, a function of level 1 inside `block` is checkpointed, too.

    `Checkpointable(model, level=3)` recomputes the modules of level 3 of any model, without changes to its code. Raises
    ValueError unless both levels are integers from 0 to 5.
    """

    def __init__(self, fn_checkpoint_level: int, training_checkpoint_level: int) -> None:
        super().__init__()
        self.fn_checkpoint_level = checked_level(fn_checkpoint_level, "fn_checkpoint_level")
        self.training_checkpoint_level = checked_level(training_checkpoint_level, "training_checkpoint_level")

    @property
    def checkpoints(self) -> bool:
        """Whether this module checkpoints now: in training mode, if its level is at most the training level."""
        return self.training and 0 < self.fn_checkpoint_level <= self.training_checkpoint_level

    def forward(self, fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """Return `fn(*args, **kwargs)`, checkpointed if the property `checkpoints` is True.

        `use_reentrant` is passed to `torch.utils.checkpoint`, which raises ValueError for True together with `kwargs`.
        """
        if not self.checkpoints or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        return checkpoint(fn, *args, use_reentrant=use_reentrant, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.fn_checkpoint_level}, training_checkpoint_level={self.training_checkpoint_level}"


def checked_level(value: object, what: str = "level") -> int:
    """Return `value` if it is a level, an integer from 0 to 5; raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value not in LEVELS:
        message = f"{what} is {value!r}; it has to be a whole number from 0 (nothing) to 5 (whole encoders)"
        raise InvalidValueError(message, kind="unknown_level", name=what)
    return value


# Matches the names that small blocks have in transformers and torchvision.
_SMALL = re.compile(
    r"attention|attn|mlp|ffn?\b|ff$|feed_?forward|residual|resblock|bottleneck|basicblock|denserelu|moe|experts?\b",
    re.IGNORECASE,
)
# Matches the names of whole encoders and decoders, by the last word of a class or an attribute.
_WHOLE = re.compile(r"(encoder|decoder|stack|tower)$", re.IGNORECASE)
# Least number of single layers with weights in a list that is a group (4), not a small block (2). A guess: VGG has
# three in its classifier, and eight or more in its features.
_GROUP = 4


class AssignedLevel(NamedTuple):
    """The level of one submodule, and the reason in words. No level recomputes a module of level 0 as a whole."""

    level: int
    reason: str


def assign_levels(model: nn.Module) -> dict[str, AssignedLevel]:
    """Return the levels of all submodules of `model`, by name; "" is the model itself. `LEVELS` defines the levels.

    A single layer has level 1, even with an activation, normalisation or dropout. A module of several single layers is
    a small block (2), a module of small blocks is a layer (3), a list of blocks or layers of one class is a group (4),
    a module of groups is an encoder or decoder (5), and a module of encoders or decoders has level 0.
    """
    found: dict[str, AssignedLevel] = {}
    # If the model contains a module under several names, include all: a caller may look up any of them.
    modules = dict(model.named_modules(remove_duplicate=False))
    # Deepest modules first, since a module's level follows from its children. `bool` puts the model itself, "", last.
    for name in sorted(modules, key=lambda name: -name.count(".") - bool(name)):
        module, kind = modules[name], type(modules[name]).__name__
        inner = [(each, found[f"{name}.{key}" if name else key].level) for key, each in module.named_children()]
        if not inner and (_is_list(module) or isinstance(module, nn.Identity)):
            found[name] = AssignedLevel(0, f"{kind} does nothing")
        elif not inner:
            found[name] = AssignedLevel(1, f"{kind} is a single layer")
        else:
            found[name] = (_of_list if _is_list(module) else _of_block)(name, module, inner)
            # The model itself has level 0, unless its class is named as an encoder or decoder.
            if not name and not (found[name].level == 5 and _is_named(_WHOLE, name, module)):
                found[name] = AssignedLevel(0, f"{kind} is the whole model")
    return {name: found[name] for name in modules}


def _of_list(name: str, module: nn.Module, inner: list[tuple[nn.Module, int]]) -> AssignedLevel:
    highest, weights = max(level for _, level in inner), _weights(module)
    kind, count = Counter(type(each).__name__ for each, level in inner if level == highest).most_common(1)[0]
    unlike = AssignedLevel(0, f"{type(module).__name__} is a list of unlike parts")
    runs = isinstance(module, nn.Sequential)  # the parts of a ModuleList need not run one after the other
    if _is_named(_WHOLE, name, module) and weights > 1:
        return AssignedLevel(5, f"{_called(name, module)} is an encoder or decoder by its name")
    if highest >= 4:
        return _holding(module, highest)
    if highest in (2, 3):
        # A list of a single block is a group, too, such as the layers of a transformer that has only one.
        if count > 1 or (count == 1 and len(inner) == 1):
            return AssignedLevel(4, f"{count} × {kind} in a row are a group")
        return AssignedLevel(highest + 1, f"a row of unlike blocks, {kind} among them") if runs else unlike
    if weights <= 1:
        return AssignedLevel(1, "at most one layer with weights, and layers without") if runs else unlike
    if weights >= _GROUP:
        return AssignedLevel(4, f"{weights} single layers in a row are a group")
    return AssignedLevel(2, f"{weights} single layers are a small block") if runs else unlike


def _of_block(name: str, module: nn.Module, inner: list[tuple[nn.Module, int]]) -> AssignedLevel:
    highest, called, weights = max(level for _, level in inner), _called(name, module), _weights(module)
    if len(inner) == 1 and highest == 5:
        return AssignedLevel(highest, f"{called} is {type(inner[0][0]).__name__} and nothing else")
    if highest >= 4:
        # In Swin and ConvNeXt, a stage, whose name is a number, has a group and a downsampling: it counts as a group.
        if highest == 4 and name.rpartition(".")[2].isdigit() and sum(level == 4 for _, level in inner) == 1:
            return AssignedLevel(4, f"{called}, one of several, holds a group")
        return _holding(module, highest)
    # Check the name before the submodules: because of these, an attention with a Sequential would be a layer (3).
    if highest <= 2 and _is_named(_SMALL, name, module):
        return AssignedLevel(2, f"{called} is a small block by its name")
    blocks = [each for each, level in inner if level in (2, 3)]
    # A module whose weights are all in one child has that child's level: other children are norms, dropouts etc.
    whole = [each for each in blocks if _weights(each) == weights]
    if len(whole) == 1:
        return AssignedLevel(highest, f"{called} has all its weights in {type(whole[0]).__name__}")
    # Blocks may also be in lists of unlike parts, which have level 0.
    lists = [child for child, level in inner if level == 0 and _is_list(child)]
    if blocks or any(each._modules and not _is_list(each) for child in lists for each in child.modules()):
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in blocks))
        return AssignedLevel(3, f"{called} holds blocks: {kinds or 'a list of them'}")
    if weights <= 1:
        return AssignedLevel(1, f"{called} has at most one layer with weights, and layers without")
    if _is_named(_WHOLE, name, module):
        return AssignedLevel(5, f"{called} is an encoder or decoder by its name")
    return AssignedLevel(2, f"{called} holds single layers")


def _holding(module: nn.Module, highest: int) -> AssignedLevel:
    held = (5, "groups of layers") if highest == 4 else (0, "whole encoders or decoders")
    return AssignedLevel(held[0], f"{type(module).__name__} holds {held[1]}")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is nn.Sequential.forward


def _is_named(pattern: re.Pattern[str], name: str, module: nn.Module) -> bool:
    return bool(pattern.search(type(module).__name__) or pattern.fullmatch(name.rpartition(".")[2]))


def _called(name: str, module: nn.Module) -> str:
    return f"{name.rpartition('.')[2]} ({type(module).__name__})" if name else type(module).__name__


def _weights(module: nn.Module) -> int:
    """Return the number of layers that have a weight of two or more dimensions. Normalisation weights have one."""
    return sum(any(p.dim() > 1 for p in each._parameters.values() if p is not None) for each in module.modules())
