"""Private names of torch that this project uses, in one place. tests/test_torch_compat.py has a contract for each.

A name is imported at first use: TorchDynamo, Inductor and FSDP take seconds to import.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import _TorchCompileInductorWrapper as _TorchCompileInductorWrapper
    from torch import _TorchCompileWrapper as _TorchCompileWrapper
    from torch._C import DispatchKey as DispatchKey
    from torch._C import DispatchKeySet as DispatchKeySet
    from torch._C import _AutoDispatchBelowAutograd as _AutoDispatchBelowAutograd
    from torch._C import _autograd as _c_autograd
    from torch._C import _current_autograd_node as _current_autograd_node
    from torch._C import _current_graph_task_id as _current_graph_task_id
    from torch._C import _disabled_torch_function_impl as _disabled_torch_function_impl
    from torch._C import _dispatch_get_registrations_for_dispatch_key as _dispatch_get_registrations_for_dispatch_key
    from torch._C import _ExcludeDispatchKeyGuard as _ExcludeDispatchKeyGuard
    from torch._C import _nn as _c_nn
    from torch._C import _set_grad_enabled as _set_grad_enabled
    from torch._C import _storage_Use_Count as _storage_use_count
    from torch._C import _will_engine_execute_node as _will_engine_execute_node
    from torch._C._autograd import _enable_record_function as _enable_record_function
    from torch._C._autograd import _get_current_graph_task_keep_graph as _get_current_graph_task_keep_graph
    from torch._C._autograd import _get_sequence_nr as _get_sequence_nr
    from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
    from torch._C._functorch import maybe_current_level as maybe_current_level
    from torch._C._functorch import pop_dynamic_layer_stack as pop_dynamic_layer_stack
    from torch._C._profiler import _ExperimentalConfig as _ExperimentalConfig
    from torch._compile import _disable_dynamo as _disable_dynamo
    from torch._dynamo import allow_in_graph as allow_in_graph
    from torch._dynamo import config as _dynamo_config
    from torch._dynamo import mark_static as mark_static
    from torch._dynamo import optimize as optimize
    from torch._dynamo.backends import registry as _dynamo_registry
    from torch._dynamo.backends.common import AotAutograd as AotAutograd
    from torch._dynamo.backends.debugging import boxed_nop as boxed_nop
    from torch._dynamo.backends.registry import lookup_backend as lookup_backend
    from torch._dynamo.callback import callback_handler as _dynamo_callbacks
    from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
    from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError
    from torch._dynamo.exc import Unsupported as Unsupported
    from torch._dynamo.guards import GuardBuilder as GuardBuilder
    from torch._dynamo.utils import graph_break_reasons as graph_break_reasons
    from torch._dynamo.variables import ConstantVariable as ConstantVariable
    from torch._dynamo.variables import builder as _dynamo_builder
    from torch._functorch import config as _functorch_config
    from torch._functorch import partitioners as partitioners
    from torch._functorch._aot_autograd import graph_compile as graph_compile
    from torch._functorch._aot_autograd.utils import _is_bwd_seed_offset as _is_bwd_seed_offset
    from torch._functorch._aot_autograd.utils import _is_primal as _is_primal
    from torch._functorch._aot_autograd.utils import _is_tangent as _is_tangent
    from torch._functorch.compile_utils import fx_graph_cse as fx_graph_cse
    from torch._functorch.compile_utils import raise_getitems as raise_getitems
    from torch._guards import CompileContext as CompileContext
    from torch._guards import TracingContext as TracingContext
    from torch._guards import compile_context as compile_context
    from torch._guards import tracing as tracing
    from torch._inductor import config as _inductor_config
    from torch._inductor import exc as _inductor_exceptions
    from torch._inductor import list_mode_options as list_mode_options
    from torch._inductor.compile_fx import compile_fx as compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import is_fake as _is_fake_tensor
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch.amp.autocast_mode import _enter_autocast as _enter_autocast
    from torch.amp.autocast_mode import _exit_autocast as _exit_autocast
    from torch.autograd.graph import _engine_run_backward as _engine_run_backward
    from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._ordered_set import OrderedSet as OrderedSet
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode as _current_dispatch_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_mode_stack
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten

    TorchCompileInductorWrapper = _TorchCompileInductorWrapper
    TorchCompileWrapper = _TorchCompileWrapper
    AutoDispatchBelowAutograd = _AutoDispatchBelowAutograd
    ExcludeDispatchKeyGuard = _ExcludeDispatchKeyGuard
    c_autograd = _c_autograd
    current_autograd_node = _current_autograd_node
    current_graph_task_id = _current_graph_task_id
    disabled_torch_function_impl = _disabled_torch_function_impl
    dispatch_get_registrations_for_dispatch_key = _dispatch_get_registrations_for_dispatch_key
    c_nn = _c_nn
    set_grad_enabled = _set_grad_enabled
    storage_use_count = _storage_use_count
    will_engine_execute_node = _will_engine_execute_node
    enable_record_function = _enable_record_function
    get_current_graph_task_keep_graph = _get_current_graph_task_keep_graph
    get_sequence_nr = _get_sequence_nr
    ExperimentalConfig = _ExperimentalConfig
    disable_dynamo = _disable_dynamo
    dynamo_config = _dynamo_config
    dynamo_registry = _dynamo_registry
    dynamo_callbacks = _dynamo_callbacks
    dynamo_builder = _dynamo_builder
    functorch_config = _functorch_config
    is_bwd_seed_offset = _is_bwd_seed_offset
    is_primal = _is_primal
    is_tangent = _is_tangent
    inductor_config = _inductor_config
    inductor_exceptions = _inductor_exceptions
    is_fake_tensor = _is_fake_tensor
    enter_autocast = _enter_autocast
    exit_autocast = _exit_autocast
    engine_run_backward = _engine_run_backward
    BatchNorm = _BatchNorm
    current_dispatch_mode = _current_dispatch_mode
    dispatch_mode_stack = _dispatch_mode_stack

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
    "OptimizedModule": "torch._dynamo.eval_frame.OptimizedModule",
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
    "enable_profiler_legacy": "torch.autograd._enable_profiler_legacy",
    "enable_record_function": "torch._C._autograd._enable_record_function",
    "engine_run_backward": "torch.autograd.graph._engine_run_backward",
    "enter_autocast": "torch.amp.autocast_mode._enter_autocast",
    "exit_autocast": "torch.amp.autocast_mode._exit_autocast",
    "function_mode_stack": "torch.overrides._get_current_function_mode_stack",
    "functorch_config": "torch._functorch.config",
    "fx_graph_cse": "torch._functorch.compile_utils.fx_graph_cse",
    "get_current_graph_task_keep_graph": "torch._C._autograd._get_current_graph_task_keep_graph",
    "get_sequence_nr": "torch._C._autograd._get_sequence_nr",
    "graph_break_reasons": "torch._dynamo.utils.graph_break_reasons",
    "graph_compile": "torch._functorch._aot_autograd.graph_compile",
    "has_any_global_hook": "torch.nn.modules.module._has_any_global_hook",
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
    "unsafe_preserve_version_counter": "torch.autograd._unsafe_preserve_version_counter",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "will_engine_execute_node": "torch._C._will_engine_execute_node",
}
"""Torch's path of each name."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = resolve_name(NAMES[name])
    return found
