"""Names for the pieces of a graph, after the modules of the model that they come from."""

from __future__ import annotations

from collections import Counter

from torch import fx

from rotor_py.capture.graph.graph_nodes import module_path


def name_pieces(pieces: list[list[fx.Node]], weights_of: dict[fx.Node, int]) -> list[str]:
    """A name for each piece: the path of the module in which its nodes weigh most.

    The path ends one level below the part that all modules of the piece share. A name that occurs more than once is
    numbered.
    """
    found = []
    for piece in pieces:
        weights: Counter[str] = Counter()
        for node in piece:
            weights[module_path(node)] += weights_of[node]
        found.append(_name(weights))
    repeated = {name for name, count in Counter(found).items() if count > 1}
    seen: Counter[str] = Counter()
    for number, name in enumerate(found):
        if name in repeated:
            seen[name] += 1
            found[number] = f"{name}#{seen[name]}"
    return found


def _name(weights: Counter[str]) -> str:
    paths = [path.split(".") for path in weights if path]
    if not paths:
        return "(top)"
    common = 0
    while all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    below: Counter[str] = Counter()
    for path, weight in weights.items():
        if path:
            below[".".join(path.split(".")[: common + 1])] += weight
    return max(below, key=lambda path: below[path])
