"""What every process does in the tests of tensor parallelism, alone and with `fully_shard`."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rotor_profiling import loss_layouts
from rotor_py.distributed.processes import meeting_in_stages
from rotor_py.measure.cut import cut
from rotor_py.measure.stage_measurer import MeasuringOptions, StageMeasurer
from tests.distributed import steps
from tests.distributed.processes import device
from tests.distributed.tensor_parallel_models import BATCH, WIDTH, batches, loss, made, time_first

warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def same_as_plain(
    rank: int, kind: str, parallel: str, share: float, closest: bool = False
) -> tuple[str, list[str], int, int, int]:
    """As that of `steps`. With `closest`, the peak is measured as closely as can be; else, one inside the prediction
    will do.
    """
    return steps.same_as_plain(partial(made, kind, parallel), batches(kind, 2), loss, share, closest=closest)


def with_parts_of_other_layouts(rank: int) -> tuple[int, list[bool]]:
    """How often a chain is measured whose gradients arrive in another layout, and in which layout they are known to.

    Of three points in time, the second process has one. Along a side of length one, strides mean nothing.
    """
    torch.manual_seed(0)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = time_first(mesh)
    value = distribute_tensor(torch.randn(BATCH, 3, WIDTH, device=device()), mesh, [Shard(1)])
    stages = StageMeasurer(
        cut(model, value, device()), value, device(), MeasuringOptions(group=meeting_in_stages(model))
    )
    walks: list[int] = []
    survey = stages._survey
    walk = survey.walk
    survey.walk = lambda *a, **k: (walks.append(1), walk(*a, **k))[1]  # type: ignore[method-assign] # to count
    output = stages.walk()
    stages.settle_layouts(loss_layouts(loss, output, device()))
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    return len(walks), [bool(layouts) for layouts in survey.arriving]
