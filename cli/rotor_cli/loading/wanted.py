"""What a model file has to define, said of one that does not.

Nothing here needs torch: of most files their text tells what they define.
"""

from __future__ import annotations

from collections.abc import Iterable

from rotor_cli.errors import Failure, usage
from rotor_cli.loading.script_file import defined_names

EXAMPLE = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))

def sample(batch):
    return torch.randn(batch, 1024)

def loss(output):                      # optional
    return output.square().mean()

def optimizer(parameters):             # optional
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
WANTED_SAMPLE = "an input called 'sample' (a tensor, tuple or dict, or a function of the batch size)"


def wanted_model(name: str) -> str:
    """What the model of a file is, in words."""
    return f"a model called {name!r} (a torch.nn.Module, or a function that makes one)"


def unusable(file: str, names: Iterable[str], wanted: str) -> Failure:
    """The failure for a file that defines these names, and not what is `wanted`; with an example of one that works."""
    defined = ", ".join(name for name in names if not name.startswith("_")) or "nothing"
    return usage(f"{file} has to define {wanted}; it defines {defined}. A file that works:\n\n{EXAMPLE}")


def refuse_file_without(name: str, file: str) -> None:
    """Failure for a file whose text tells that it defines no model of this name."""
    defined = defined_names(file)
    if defined is not None and name not in defined:
        raise unusable(file, defined, wanted_model(name))
