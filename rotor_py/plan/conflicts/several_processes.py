"""What one process can do alone, and several that train a model together cannot."""

from __future__ import annotations

from rotor_py.errors import UnsupportedModelError
from rotor_py.plan.settings import Settings
from rotor_py.plan.trained_model import TrainedModel

_REASONS = {
    "step_in_backward": "its gradients are whole only when all have sent theirs; leave step_in_backward out",
    "on_oom='replan'": "the others would wait for what this one sends while it runs stages again; leave on_oom out",
}
"""Why a setting is for one process, and the remedy."""


def refuse_several_processes(model: TrainedModel) -> None:
    """UnsupportedModelError if a setting is for one process, and `model` is trained by several, or is sharded."""
    option, name = _for_one_process(model.settings), type(model.core).__name__
    if option is None and model.settings.offload is None:
        return  # before all parameters are looked at: every step comes here
    sharded = model.sharded or _has_distributed_parameters(model)
    if model.settings.offload is not None and sharded:
        raise UnsupportedModelError(
            f"offload= moves what stages of plain training save, and {name} is sharded: its stages run in regions, "
            "which save their inputs alone; leave offload= out",
            kind="excluded_together",
            name="offload",
        )
    if option is not None and (not model.alone or sharded):
        raise UnsupportedModelError(
            f"{option} is for one process, and {name} is trained by several or sharded: {_REASONS[option]}",
            kind="one_process_only",
            name=option,
        )


def _for_one_process(settings: Settings) -> str | None:
    if settings.step_in_backward is not None:
        return "step_in_backward"
    return "on_oom='replan'" if settings.replans else None


def _has_distributed_parameters(model: TrainedModel) -> bool:
    return any(hasattr(each, "device_mesh") for each in model.core.parameters())
