"""What one process can do alone, and several that train a model together cannot."""

from __future__ import annotations

from rotor_py.errors import UnsupportedModelError
from rotor_py.plan.settings import Settings
from rotor_py.plan.trained_model import TrainedModel

_REASONS = {
    "step_in_backward": "its gradients are whole only when all have sent theirs; leave step_in_backward out",
    "offload=": "their plans would differ by what each of them measures of its own disk; leave offload= out",
    "on_oom='replan'": "the others would wait for what this one sends while it runs stages again; leave on_oom out",
}
"""Why a setting is for one process, and the remedy."""


def refuse_several_processes(model: TrainedModel) -> None:
    """UnsupportedModelError if a setting is for one process, and `model` is trained by several, or is sharded."""
    option = _for_one_process(model.settings)
    if option is not None and (not model.alone or model.sharded or _has_distributed_parameters(model)):
        raise UnsupportedModelError(
            f"{option} is for one process, and {type(model.core).__name__} is trained by several or sharded: "
            f"{_REASONS[option]}"
        )


def _for_one_process(settings: Settings) -> str | None:
    if settings.step_in_backward is not None:
        return "step_in_backward"
    if settings.offload is not None:
        return "offload="
    return "on_oom='replan'" if settings.replans else None


def _has_distributed_parameters(model: TrainedModel) -> bool:
    return any(hasattr(each, "device_mesh") for each in model.core.parameters())
