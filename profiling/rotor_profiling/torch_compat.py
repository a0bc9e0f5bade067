"""Private names of torch that this project uses, in one place. tests/test_torch_compat.py has a test for each name.

A name is imported when first used: TorchDynamo, Inductor and FSDP take seconds to import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

if TYPE_CHECKING:  # names whose types mypy needs
    from torch import _TorchCompileInductorWrapper as TorchCompileInductorWrapper, nn
    from torch._C import (
        DispatchKey,
        _current_graph_task_id as current_graph_task_id,
        _disabled_torch_function_impl as disabled_torch_function_impl,
        _will_engine_execute_node as will_engine_execute_node,
    )
    from torch._C._autograd import _get_sequence_nr as get_sequence_nr
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError, Unsupported
    from torch._functorch import partitioners
    from torch._guards import CompileContext, TracingContext
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.tensor import DTensor
    from torch.utils._ordered_set import OrderedSet
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import TreeSpec, tree_flatten

# Maps the name of each attribute of this module to its path in torch
NAMES = {
    "AotAutograd": "torch._dynamo.backends.common.AotAutograd",
    "AutoDispatchBelowAutograd": "torch._C._AutoDispatchBelowAutograd",
    "BatchNorm": "torch.nn.modules.batchnorm._BatchNorm",
    "CompileContext": "torch._guards.CompileContext",
    "ConstantVariable": "torch._dynamo.variables.ConstantVariable",
    "CustomGraphPass": "torch._inductor.custom_graph_pass.CustomGraphPass",
    "CustomPartitionerFn": "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    "DataDependentOutputException": "torch._subclasses.fake_tensor.DataDependentOutputException",
    "DispatchKey": "torch._C.DispatchKey",
    "DispatchKeySet": "torch._C.DispatchKeySet",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "ExcludeDispatchKeyGuard": "torch._C._ExcludeDispatchKeyGuard",
    "ExperimentalConfig": "torch._C._profiler._ExperimentalConfig",
    "FakeStore": "torch.testing._internal.distributed.fake_pg.FakeStore",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "GuardBuilder": "torch._dynamo.guards.GuardBuilder",
    "OpOverload": "torch._ops.OpOverload",
    "OpOverloadPacket": "torch._ops.OpOverloadPacket",
    "OrderedSet": "torch.utils._ordered_set.OrderedSet",
    "TorchCompileInductorWrapper": "torch._TorchCompileInductorWrapper",
    "TorchCompileWrapper": "torch._TorchCompileWrapper",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "TorchDynamoException": "torch._dynamo.exc.TorchDynamoException",
    "TorchRuntimeError": "torch._dynamo.exc.TorchRuntimeError",
    "TracingContext": "torch._guards.TracingContext",
    "TreeSpec": "torch.utils._pytree.TreeSpec",
    "Unsupported": "torch._dynamo.exc.Unsupported",
    "allow_in_graph": "torch._dynamo.allow_in_graph",
    "boxed_nop": "torch._dynamo.backends.debugging.boxed_nop",
    "c_autograd": "torch._C._autograd",
    "c_nn": "torch._C._nn",
    "compile_context": "torch._guards.compile_context",
    "compile_fx": "torch._inductor.compile_fx.compile_fx",
    "current_autograd_node": "torch._C._current_autograd_node",
    "current_dispatch_mode": "torch.utils._python_dispatch._get_current_dispatch_mode",
    "current_graph_task_id": "torch._C._current_graph_task_id",
    "disable_current_modes": "torch.utils._python_dispatch._disable_current_modes",
    "disable_dynamo": "torch._compile._disable_dynamo",
    "disable_profiler_legacy": "torch.autograd._disable_profiler_legacy",
    "disabled_torch_function_impl": "torch._C._disabled_torch_function_impl",
    "dispatch_get_registrations_for_dispatch_key": "torch._C._dispatch_get_registrations_for_dispatch_key",
    "dispatch_mode_stack": "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "dynamo_builder": "torch._dynamo.variables.builder",
    "dynamo_callbacks": "torch._dynamo.callback.callback_handler",
    "dynamo_config": "torch._dynamo.config",
    "dynamo_registry": "torch._dynamo.backends.registry",
    "dynamo_skips": "torch._dynamo.trace_rules.check",
    "enable_profiler_legacy": "torch.autograd._enable_profiler_legacy",
    "enable_record_function": "torch._C._autograd._enable_record_function",
    "engine_run_backward": "torch.autograd.graph._engine_run_backward",
    "enter_autocast": "torch.amp.autocast_mode._enter_autocast",
    "exit_autocast": "torch.amp.autocast_mode._exit_autocast",
    "exit_dual_level": "torch._C._exit_dual_level",
    "function_mode_stack": "torch.overrides._get_current_function_mode_stack",
    "functorch_config": "torch._functorch.config",
    "fx_graph_cse": "torch._functorch.compile_utils.fx_graph_cse",
    "get_current_graph_task_keep_graph": "torch._C._autograd._get_current_graph_task_keep_graph",
    "get_sequence_nr": "torch._C._autograd._get_sequence_nr",
    "graph_break_reasons": "torch._dynamo.utils.graph_break_reasons",
    "graph_compile": "torch._functorch._aot_autograd.graph_compile",
    "has_any_global_hook": "torch.nn.modules.module._has_any_global_hook",
    "indices_of": "torch.Tensor._indices",
    "inductor_config": "torch._inductor.config",
    "inductor_exceptions": "torch._inductor.exc",
    "is_bwd_seed_offset": "torch._functorch._aot_autograd.utils._is_bwd_seed_offset",
    "is_fake_tensor": "torch._subclasses.fake_tensor.is_fake",
    "is_functorch_wrapped_tensor": "torch._C._functorch.is_functorch_wrapped_tensor",
    "is_primal": "torch._functorch._aot_autograd.utils._is_primal",
    "is_tangent": "torch._functorch._aot_autograd.utils._is_tangent",
    "list_mode_options": "torch._inductor.list_mode_options",
    "lookup_backend": "torch._dynamo.backends.registry.lookup_backend",
    "make_wrapper_subclass": "torch.Tensor._make_wrapper_subclass",
    "mark_static": "torch._dynamo.mark_static",
    "maybe_current_level": "torch._C._functorch.maybe_current_level",
    "new_with_weak_ptr": "torch.UntypedStorage._new_with_weak_ptr",
    "optimize": "torch._dynamo.optimize",
    "partitioners": "torch._functorch.partitioners",
    "pop_dispatch_mode": "torch.utils._python_dispatch._pop_mode",
    "pop_dynamic_layer_stack": "torch._C._functorch.pop_dynamic_layer_stack",
    "pop_function_mode": "torch.overrides._pop_mode",
    "profiler_enabled": "torch.autograd._profiler_enabled",
    "push_dispatch_mode": "torch.utils._python_dispatch._push_mode",
    "push_function_mode": "torch.overrides._push_mode",
    "queue_callback": "torch.autograd.Variable._execution_engine.queue_callback",
    "raise_getitems": "torch._functorch.compile_utils.raise_getitems",
    "scaled_dot_product_flash_attention_for_cpu": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "set_grad_enabled": "torch._C._set_grad_enabled",
    "storage_use_count": "torch._C._storage_Use_Count",
    "tracing": "torch._guards.tracing",
    "tree_flatten": "torch.utils._pytree.tree_flatten",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map": "torch.utils._pytree.tree_map",
    "tree_map_only": "torch.utils._pytree.tree_map_only",
    "tree_unflatten": "torch.utils._pytree.tree_unflatten",
    "module_hooks": "torch.nn.modules.module",
    "parametrize": "torch.nn.utils.parametrize",
    "unsafe_preserve_version_counter": "torch.autograd._unsafe_preserve_version_counter",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "values_of": "torch.Tensor._values",
    "will_engine_execute_node": "torch._C._will_engine_execute_node",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = resolve_name(NAMES[name])
    return found


_ALIKE = (
    "float32_matmul_precision cudnn_allow_tf32 cudnn_enabled cudnn_benchmark cudnn_deterministic mkldnn_enabled "
    "mkldnn_deterministic nnpack_enabled cublas_allow_fp16_accumulation math_sdp_allow_fp16_bf16_reduction"
)
_C_SETTINGS = [
    *((f"_get_{name}", f"_set_{name}") for name in _ALIKE.split()),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
]
_FP32 = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]


class KernelSetting(NamedTuple):
    """One setting that holds for the whole process, with functions that read it and set it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]

    def get(self) -> Any:
        try:
            return self.read()
        except RuntimeError:  # raised by older settings once the user has set a precision by the newer functions
            return None

    def set(self, value: Any) -> None:
        if value is not None:
            self.write(value)


def settings_now() -> tuple[Any, ...]:
    """Return the values of all `SETTINGS`. Fast, since each node of each forward calls it."""
    try:
        return tuple([each.read() for each in SETTINGS])
    except RuntimeError:
        return tuple([each.get() for each in SETTINGS])


# Settings by which operators choose kernels and precision, as far as this torch release has them.
SETTINGS = [
    KernelSetting(torch.get_default_dtype, torch.set_default_dtype),
    KernelSetting(torch.get_num_threads, torch.set_num_threads),
    KernelSetting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(KernelSetting(*(getattr(torch._C, each) for each in pair)) for pair in _C_SETTINGS if hasattr(torch._C, pair[0])),
]
if hasattr(torch._C, "_get_fp32_precision_getter"):  # last: setting one of the older settings changes these
    _get, _put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    SETTINGS += [KernelSetting(partial(_get, *each), partial(_put, *each)) for each in _FP32]


# Checks for classes of modules that take long to import. A module that is not imported yet has no instances.


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a tensor distributed over processes."""
    return isinstance(value, _class("torch.distributed.tensor", "DTensor"))


def is_fake(value: object) -> bool:
    return isinstance(value, _class("torch._subclasses.fake_tensor", "FakeTensor"))


def is_optimized(module: object) -> TypeGuard[OptimizedModule]:
    return isinstance(module, _class("torch._dynamo.eval_frame", "OptimizedModule"))


def is_fsdp_module(module: object) -> bool:
    return isinstance(module, _fsdp_classes())


def has_fsdp_module(model: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to any module of a model. Fast, since every step calls it."""
    classes = _fsdp_classes()
    # `fully_shard` derives a subclass for each type of module: without subclasses, it was not applied.
    if not any(each and each.__subclasses__() for each in classes):
        return False
    pending = [model]  # not by `modules()`, whose deduplication takes longer
    while pending:
        module = pending.pop()
        if isinstance(module, classes):
            return True
        pending += [child for child in module._modules.values() if child is not None]
    return False


def _fsdp_classes() -> tuple[Any, ...]:
    folders = "torch.distributed.fsdp", "torch.distributed._composable.fsdp"  # the latter before torch 2.6
    return tuple(_class(folder, "FSDPModule") for folder in folders)


def _class(module: str, name: str) -> Any:
    """Return the class `name` of `module`; (), of which nothing is an instance, if `module` is not fully imported."""
    return getattr(sys.modules.get(module), name, ())
