import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
