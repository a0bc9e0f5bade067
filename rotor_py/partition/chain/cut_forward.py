"""Where the forward is cut into stages: where little is live, and at least so many bytes apart."""

from __future__ import annotations

import operator
from functools import cached_property
from itertools import pairwise

from torch import fx

from rotor_py.partition.chain.values import Values

_MOST_STAGES = 64
"""Cuts are at least this part of all allocated bytes apart. A guess: more stages are solved longer for little gain."""
_SPREAD = 4
"""A small value that is live over so many cuts is kept and belongs to no stage: masks, tables of rotary embeddings."""
_SMALL = 0.01
"""What a small value is, as a part of all allocated bytes. A guess."""


class CutForward(Values):
    """The forward in stages, and what goes from one to the next."""

    @cached_property
    def cuts(self) -> list[int]:
        """Positions in the forward where a stage begins; the first is 0."""
        joint, values = self.joint, set(self.values)
        ending: dict[int, int] = {}
        for value in self.values:
            ending[self.last_read[value]] = ending.get(self.last_read[value], 0) + joint.bytes_of(value)
        live, made, lives, mades = 0, 0, [0], [0]
        for position, node in enumerate(joint.forward):
            size = joint.bytes_of(node) if node in values else 0
            live, made = live + size, made + size
            live -= ending.get(position, 0)
            lives.append(live)
            mades.append(made)
        apart = max(1, made // _MOST_STAGES)
        found, last = [0], 0
        for position in range(1, len(joint.forward)):
            if joint.forward[position].target is operator.getitem or mades[position] - last < apart:
                continue
            # The first of the positions with least live memory within reach.
            reach = range(position + 1, len(lives))
            near = []
            for other in reach:
                if mades[other] - mades[position] > apart:
                    break
                near.append(lives[other])
            behind = [lives[p] for p in range(position - 1, found[-1], -1) if mades[position] - mades[p] <= apart]
            if all(lives[position] <= each for each in near) and all(lives[position] <= each for each in behind):
                found.append(position)
                last = mades[position]
        return found

    @cached_property
    def stage_of(self) -> dict[fx.Node, int]:
        """By node of the forward, the number of its stage."""
        found, number = {}, -1
        starts = set(self.cuts)
        for position, node in enumerate(self.joint.forward):
            number += position in starts
            found[node] = number
        return found

    @cached_property
    def members(self) -> list[list[fx.Node]]:
        """The nodes of every stage."""
        bounds = [*self.cuts, len(self.joint.forward)]
        return [self.joint.forward[a:b] for a, b in pairwise(bounds)]

    @cached_property
    def shared(self) -> set[fx.Node]:
        """Values that are kept throughout: outputs, which the caller has, small ones that many stages read."""
        joint = self.joint
        small = _SMALL * sum(map(joint.bytes_of, self.values))
        starts = self.cuts
        found = {joint.root[node] for node in joint.outputs if node in joint.root}
        positions = {node: position for position, node in enumerate(joint.forward)}
        for value in self.values:
            over = sum(positions[value] < start <= self.last_read[value] for start in starts)
            if over >= _SPREAD and joint.bytes_of(value) <= small:
                found.add(value)
        return found & set(self.values)

    @cached_property
    def inputs(self) -> list[list[fx.Node]]:
        """By cut, and for the end of the forward, the values that are live there and not shared."""
        positions = {node: position for position, node in enumerate(self.joint.forward)}
        own = [value for value in self.values if value not in self.shared]
        found = [[v for v in own if positions[v] < start <= self.last_read[v]] for start in self.cuts]
        return [*found, []]

    @cached_property
    def inside(self) -> list[list[fx.Node]]:
        """By stage, its values that are not shared."""
        values = set(self.values) - self.shared
        return [[node for node in members if node in values] for members in self.members]
