"""Which values of a graph autograd saves for the backward, found by running the graph.

torch has no table of what each operator saves: that depends on which inputs need a gradient, and on the version of
torch. So the stage is run with autograd on, and with hooks that see every saved tensor. Where a stage is measured, it
is run on its input. Elsewhere there is none, and it is run on tensors without memory: that takes some milliseconds for
each operator that is a composition of others to them, longer than most small stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from rotor_profiling.storage import local
from rotor_py.capture.graph.graph_nodes import GATHERED, overwrites, owned_by
from rotor_py.capture.graph.parts.prices import FlopCount, kind_of
from rotor_py.capture.graph.sizes import Sizes, example_of
from rotor_py.capture.marks.fsdp_marks import is_mark


@dataclass(frozen=True, slots=True)
class SavedValues:
    """What a run of a graph with autograd shows: the nodes whose memory is `saved`; for every node with a tensor the
    one that allocated its memory or wrote to it last (`roots`); the nodes whose tensor is `in_graph`; the `flops` of
    those that take long.

    What a node made is gone if a later one has `overwritten` it: it can be made again, but not kept. A `stale` node
    reads memory through a view from before a write to it: from that, it would not be made again as it was.
    """

    saved: set[fx.Node]
    roots: dict[fx.Node, fx.Node]
    in_graph: set[fx.Node]
    flops: dict[fx.Node, int]
    overwritten: set[fx.Node] = field(default_factory=set)
    stale: set[fx.Node] = field(default_factory=set)


def find_saved_values(body: fx.GraphModule, sizes: Sizes, arguments: Sequence[Any] | None = None) -> SavedValues:
    """What autograd saves of `body`, run on `arguments`, or else on tensors without memory.

    `sizes` says what the symbols of the graph stand for. Raises TypeError for tensors of a subclass or without strides,
    and for operators that change a tensor without writing to it. What an operator raises that does not take tensors
    without memory passes through.
    """
    found = SavedValues(set(), {}, set(), {})
    memories = _Memories(found)
    values: dict[fx.Node, Any] = {}
    readers = Counter({node: len(node.users) for node in body.graph.nodes})
    mode = FakeTensorMode(allow_non_fake_inputs=True) if arguments is None else nullcontext()
    given = iter(arguments or ())
    with (
        mode,
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(memories.save, lambda tensor: tensor),
    ):
        for node in body.graph.nodes:
            if node.op == "output":
                break
            read = {each: list(_tensors(values[each])) for each in node.all_input_nodes}
            before = [tensor._version for tensors in read.values() for tensor in tensors]
            with FlopCount() if kind_of(node) else nullcontext() as count:
                if isinstance(mode, FakeTensorMode):
                    values[node] = _without_memory(body, node, values, mode, sizes)
                else:
                    values[node] = _on(given, body, node, values)
            if count is not None:
                found.flops[node] = count.total
            after = [tensor for tensors in read.values() for tensor in tensors]
            written = [each for each, version in zip(after, before, strict=True) if each._version != version]
            if not written and node.op.startswith("call") and overwrites(node):
                raise TypeError(f"{node.target} changes a tensor, but not what is in its memory")
            memories.read(node, read)
            memories.write(node, written)
            memories.make(node, list(_tensors(values[node])))
            del read, after, written
            # As in training: what nobody reads any more is not held.
            readers.subtract(node.all_input_nodes)
            for each in (node, *node.all_input_nodes):
                if not readers[each]:
                    values.pop(each, None)
    memories.end()
    return found


class _Memories:
    """The memories of a graph's values as far as it has run, and what is `found` of them."""

    def __init__(self, found: SavedValues) -> None:
        self._found = found
        self._made_by: dict[int, fx.Node] = {}
        """the node that allocated a memory, or wrote to it last"""
        self._seen: dict[fx.Node, dict[int, fx.Node]] = {}
        """for each node and memory of its tensors, the last of those nodes that it depends on"""
        self._saved: set[int] = set()
        """Some of them no node has returned yet: operators save their own output, or what only they know."""
        self._known: dict[int, StorageWeakRef] = {}
        """They keep the numbers of memories from being used again, and hold no memory."""

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        # By memory, not by tensor: what is saved is often a view of what a node returned.
        self._saved.add(self._number(tensor))
        return tensor.detach()  # a result that is saved with its history would hold its own node, for good

    def _number(self, tensor: torch.Tensor) -> int:
        """What the memory of a tensor is known by."""
        storage = local(tensor).untyped_storage()
        number = int(storage._cdata)
        if number not in self._known:
            self._known[number] = StorageWeakRef(storage)
        return number

    def read(self, node: fx.Node, inputs: Mapping[fx.Node, list[torch.Tensor]]) -> None:
        """A node has read the tensors of these."""
        for each, tensors in inputs.items():
            if any(self._seen[each][memory] is not self._made_by[memory] for memory in map(self._number, tensors)):
                self._found.stale.add(node)

    def write(self, node: fx.Node, tensors: Iterable[torch.Tensor]) -> None:
        """A node has written to the memory of these."""
        for memory in {*map(self._number, tensors)}:
            self._found.overwritten.add(self._made_by[memory])
            self._made_by[memory] = node

    def make(self, node: fx.Node, tensors: Iterable[torch.Tensor]) -> None:
        """A node has returned these."""
        seen = self._seen[node] = {}
        for tensor in tensors:
            if tensor.requires_grad:
                self._found.in_graph.add(node)
            memory = self._number(tensor)
            made_by = self._made_by.setdefault(memory, node)
            if made_by is not node:  # a view: what is made again from its inputs is what these see
                before = [self._seen[each].get(memory, made_by) for each in node.all_input_nodes]
                made_by = next((each for each in before if each is not made_by), made_by)
            seen[memory] = self._found.roots[node] = made_by

    def end(self) -> None:
        """Nothing comes any more. Of memory that was saved and written to, the last write counts: autograd refuses a
        backward that would read another one.
        """
        made_by = {self._made_by[memory] for memory in self._saved if memory in self._made_by}
        # An operator that writes and returns nothing has no value to keep or to drop: its memory is saved as it is.
        self._found.saved.update(node for node in made_by if self._found.roots.get(node) is node)


def _on(arguments: Iterator[Any], body: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node on what the graph is called with: of these `arguments`, every input takes the next one."""
    if node.op == "placeholder":
        found = next(arguments)
    elif node.op == "get_attr":
        found = owned_by(body, node)
    else:
        return _called(node, *fx.node.map_arg((node.args, node.kwargs), values.__getitem__))
    for tensor in _tensors(found):
        _refuse_special(tensor)
    return found


def _without_memory(
    body: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], mode: FakeTensorMode, sizes: Sizes
) -> Any:
    """The value of a node on tensors of this `mode`."""
    if node.op == "placeholder":
        return fx.node.map_aggregate(example_of(node), lambda each: _like(each, sizes))
    if node.op == "get_attr":
        found = owned_by(body, node)
        if not isinstance(found, torch.Tensor):
            return found
        if GATHERED in node.meta:
            return _like(found, sizes)
        _refuse_special(found)
        return mode.from_tensor(found)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return args[1:] if is_mark(node) else _called(node, args, kwargs)


def _called(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a function


def _like(value: Any, sizes: Sizes) -> Any:
    """A tensor of this mode like one of Dynamo's, which belongs to a mode of its own and has symbolic shapes."""
    if isinstance(value, DTensor):
        part = _like(value._local_tensor, sizes).requires_grad_(value.requires_grad)
        shape, strides = torch.Size(map(sizes.number, value.shape)), tuple(map(sizes.number, value.stride()))
        return DTensor.from_local(
            part, value.device_mesh, value.placements, run_check=False, shape=shape, stride=strides
        )
    if isinstance(value, torch.Tensor):
        _refuse_special(value)
        size, stride = list(map(sizes.number, value.shape)), list(map(sizes.number, value.stride()))
        like = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        return like.requires_grad_(value.requires_grad)
    return sizes.number(value)


def _refuse_special(tensor: torch.Tensor) -> None:
    """TypeError for a tensor whose memory is not simply strided, so that bytes and views of it mean something else."""
    tensor = local(tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) or tensor.layout is not torch.strided:
        raise TypeError(f"{type(tensor).__name__} of layout {tensor.layout}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
