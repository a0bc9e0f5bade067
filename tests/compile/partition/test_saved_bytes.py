"""What Inductor saves of convolutions, and what they take beside inputs and outputs, is what the joint graph shows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._dynamo.backends.common import AotAutograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

from rotor_profiling.storage import storage_bytes
from rotor_py import memory_budget
from rotor_py.compile.candidates import by_torch
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.partition import GraphCosts, Run, in_registers
from rotor_py.compile.partitioner import BudgetPartitioner, SavedInputs, saving_inputs
from rotor_py.compile.stage_code import compile_code
from tests.checkpointable.steps import Residual
from tests.compile.partition.compiled_steps import Block, Loss, compiled_step, noted_usual, seen_candidates, take_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class UpAndDown(nn.Sequential):
    """Convolutions, batch norms, ReLUs, a pooling and two ways up again."""

    def __init__(self) -> None:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

        up = nn.Upsample(scale_factor=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        super().__init__(*block(3, 16), nn.MaxPool2d(2), *up)


def saved_bytes(made: torch.Tensor, *given: torch.Tensor) -> int:
    """The bytes that the node of compiled code holds beside what it was given, and what it has made."""
    node: Any = made.grad_fn
    held = {tensor.untyped_storage()._cdata for tensor in (*given, made)}
    return storage_bytes([each for each in node.saved_tensors if each.untyped_storage()._cdata not in held])


@pytest.mark.slow
def test_what_a_partition_saves_is_known_from_its_graph() -> None:
    torch._dynamo.reset()
    model, value = UpAndDown(), torch.randn(2, 3, 16, 16)
    options = memory_budget("1GB").options
    with fresh_cache():  # a graph that Inductor finds on disk is not divided again
        output = torch.compile(model, options=options)(value)
    (weight,) = options["custom_partitioner_fn"].chosen.values()
    assert weight.saved
    assert saved_bytes(output, *model.parameters(), *model.buffers(), value) == weight.saved


def test_a_compiled_stage_saves_its_weights_and_no_copies_by_a_pass_that_runs_after_others() -> None:
    stage, value = nn.Conv2d(16, 16, 3), torch.randn(1, 16, 5, 5)
    made = compile_code(stage, value, [True], ()).run(stage, value.requires_grad_())
    assert saved_bytes(made, *stage.parameters(), value) == 0

    class Other(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> None: ...

    other, name = Other(), "post_grad_custom_post_pass"
    for passes in (other, [other]):
        once = saving_inputs({name: passes})
        for options in (once, saving_inputs(once)):
            first, second = options[name]
            assert first is other
            assert isinstance(second, SavedInputs)


def deep() -> nn.Module:
    """As at the bottom of a U-Net: weights that are much larger than images."""
    return nn.Sequential(*(nn.Conv2d(128, 128, 3, padding=1, bias=False) for _ in range(2)))


def apart() -> nn.Module:
    depthwise = nn.Conv2d(128, 128, 7, padding=3, groups=128), nn.Conv2d(128, 512, 1), nn.GELU(), nn.Conv2d(512, 128, 1)
    return nn.Sequential(nn.Conv2d(8, 128, 1), *(Residual(*copy.deepcopy(depthwise)) for _ in range(3)))


def test_the_peak_of_convolutions_that_run_one_by_one_is_that_of_the_graph() -> None:
    """Their layouts stay: not even the first one, whose image needs no gradient, copies what it is given."""
    torch._dynamo.reset()
    model, chooser = Loss(nn.Conv2d(64, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), BudgetPartitioner("1GB")
    run = torch.compile(model, backend=AotAutograd(fw_compiler=boxed_nop, partition_fn=chooser))
    step = take_step(model, run, torch.randn(4, 64, 32, 32))
    (weight,) = chooser.chosen.values()
    assert 0.98 * weight.peak <= step.peak <= weight.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "shape", "roomy", "least"),
    [
        (deep, (2, 128, 4, 4), True, 1.0),
        # The least budget leaves no room to recompute many: oneDNN's scratch for a depthwise one takes up to 5 MB.
        (apart, (4, 8, 8, 8), False, 0.85),
    ],
)
def test_the_peak_of_convolutions_under_inductor_is_known_from_the_graph(made, shape, roomy, least) -> None:
    torch._dynamo.reset()
    model, value = Loss(made()), torch.randn(shape)
    with pytest.raises(BackendCompilerFailed) as failed:
        torch.compile(model, options=memory_budget(1).options)(value)
    options = memory_budget(10**9 if roomy else failed.value.inner_exception.min_bytes).options
    with fresh_cache():  # a graph that Inductor finds on disk is not divided again
        step = take_step(model, torch.compile(model, options=options), value)
    (weight,) = options["custom_partitioner_fn"].chosen.values()
    assert least * weight.peak <= step.peak <= 1.02 * weight.peak


@pytest.mark.slow
def test_the_estimated_peak_is_near_that_of_fused_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted_usual(monkeypatch)
    torch._dynamo.reset()
    model = Loss(Block(64))
    chooser = BudgetPartitioner("1GB", fused=True, estimated=True)
    with fresh_cache():
        run = torch.compile(model, options={"custom_partitioner_fn": chooser})
        step = take_step(model, run, torch.randn(4, 128, 64))
    (weight,) = chooser.chosen.values()
    assert 0.9 * step.peak < weight.peak < 1.08 * step.peak
    ((joint, _),) = seen
    (bound,) = by_torch(joint, GraphCosts.of(joint, fused=True), [1])
    assert weight.peak < bound.weight.peak


def read_on_both_sides(x: torch.Tensor) -> torch.Tensor:
    read_twice = torch.exp(x)
    return (torch.tanh(read_twice) @ x).sin() + read_twice


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: torch.tanh(torch.exp(x)).sin(), ["exp", "tanh"]),
        (lambda x: torch.exp(x).view(64).sin(), ["exp", "view"]),
        (lambda x: torch.exp(x) @ x, []),
        (lambda x: torch.exp(x).view(4, 16) @ x.view(16, 4), []),
        (read_on_both_sides, ["sin"]),
        (lambda x: (torch.exp(x).sum(1) * 2).sin(), ["exp", "mul"]),
    ],
)
def test_a_value_stays_in_registers_if_one_kernel_makes_and_reads_it(function: Any, names: list[str]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(function, tracing_mode="fake")(torch.randn(8, 8))
    steps: dict[fx.Node, Run] = {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            steps[node] = Run(node, {each: steps.get(each, each) for each in node.all_input_nodes})
    ends = {steps[each] for each in module.graph.output_node().all_input_nodes}
    inside = in_registers(JointGraph(module, 1), list(steps.values()), ends)
    assert [str(node) for node, run in steps.items() if run in inside] == names


WIDTH = 16
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "softmax": lambda: nn.Softmax(-1),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)),
    "residual": lambda: Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)),
}
CHAIN = ("linear", "gelu", "dropout", "norm") * 2
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain": (lambda: nn.Sequential(*(LAYERS[name]() for name in CHAIN)), (256, WIDTH)),
    "llama": (lambda: nn.Sequential(*(Block(16) for _ in range(2))), (2, 64, 16)),
}


@pytest.mark.parametrize("name", ["chain", pytest.param("llama", marks=pytest.mark.slow)])
def test_peaks_are_the_predicted_ones_to_the_byte_fall_with_budgets_and_numbers_stay(name: str, monkeypatch) -> None:
    made, shape = MODELS[name]
    torch.manual_seed(2)
    value = torch.randn(shape)
    with seen_candidates(monkeypatch) as found:
        stored = compiled_step(made, value, 10**12)
    peaks = [each.weight.peak for each in found[0]]
    assert peaks == sorted(set(peaks))
    assert peaks[0] < 0.9 * peaks[-1]
    for peak in (peaks[0], peaks[len(peaks) // 2]):
        step = compiled_step(made, value, peak)
        assert step.peak == peak
        assert step.equals(stored)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=3, max_size=8), place=st.floats(0, 1))
def test_any_model_stays_within_any_budget_that_it_can(layers: list[str], place: float) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in layers))

    torch.manual_seed(2)
    value = torch.randn(64, WIDTH)
    with pytest.MonkeyPatch.context() as patch, seen_candidates(patch) as found:
        stored = compiled_step(made, value, 10**12)
    least, most = found[0][0].weight.peak, found[0][-1].weight.peak
    budget = int(least + place * (most - least))
    step = compiled_step(made, value, budget)
    assert step.peak <= budget
    assert step.equals(stored)
