"""Which module and which repeated block every node belongs to, and which blocks are isomorphic."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx

from autopar._compat import OpOverload, pytree
from autopar.capture.graph import BlockClass, specs_of


def block_path(module: str) -> str | None:
    """The block that a module path lies in: up to its first numeric component ("model.layers.3"), or None."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def pattern(path: str) -> str:
    """A path with its first number replaced by ``*``: the same for corresponding modules of all blocks."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:i], "*", *parts[i + 1 :]])
    return path


def _module_from_inputs(node: fx.Node) -> str:
    """For a node without an annotation (autograd's accumulation adds): the common module of its inputs, else the
    block of the earlier one, DESIGN section 4."""
    modules = [arg.meta["module"] for arg in node.all_input_nodes if arg.op == "call_function"]
    if not modules:
        return ""
    if len(set(modules)) == 1:
        return str(modules[0])
    blocks = [block_path(m) for m in modules]
    known = [b for b in blocks if b is not None]
    if not known:
        return ""
    return known[0] if len(set(known)) == 1 and len(known) == len(blocks) else min(known, key=_order)


def _order(path: str) -> tuple[Any, ...]:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split("."))


def label(graph: fx.Graph, parameters: Iterable[tuple[fx.Node, str]]) -> None:
    """Fill ``module``, ``block`` and ``backward`` in the ``meta`` of every node."""
    owner = {node: name.rpartition(".")[0] for node, name in parameters}
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if node.op == "placeholder":
            node.meta["module"] = owner.get(node, "")
            node.meta["backward"] = node.meta.get("partitioner_tag") == "is_backward"
        elif node.op == "call_function":
            node.meta["module"] = custom["module"] if "module" in custom else _module_from_inputs(node)
            node.meta["backward"] = node.meta.get("partitioner_tag") == "is_backward" or any(
                arg.meta.get("backward") for arg in node.all_input_nodes
            )
        else:
            continue
        node.meta["block"] = block_path(node.meta["module"])


@functools.cache
def stream_argument(target: Any) -> int | None:
    """Position of the argument that numbers a random operator and does not change what it is; None for all others."""
    if not isinstance(target, OpOverload) or target.namespace != "autopar":
        return None
    return next((i for i, a in enumerate(target._schema.arguments) if a.name == "stream"), None)


def _signature(node: fx.Node, position: dict[fx.Node, int], outside: dict[fx.Node, int]) -> tuple[Any, ...]:
    """What makes a node of one block correspond to a node of another."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return str(value)
        if value in position:
            return ("in", position[value])
        return ("out", outside.setdefault(value, len(outside)), value.op, specs_of(value))

    args = [a for i, a in enumerate(node.args) if i != stream_argument(node.target)]
    flat = tuple(leaf(v) for v in pytree.tree_leaves((args, dict(sorted(node.kwargs.items())))))
    return (str(node.target), flat, specs_of(node), pattern(node.meta["module"]), node.meta["backward"])


def _hash(nodes: Sequence[fx.Node]) -> str:
    position: dict[fx.Node, int] = {}
    outside: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    for i, node in enumerate(nodes):
        digest.update(repr(_signature(node, position, outside)).encode())
        position[node] = i
    return digest.hexdigest()


def block_classes(graph: fx.Graph, skip: Collection[Any] = ()) -> tuple[BlockClass, ...]:
    """Group the blocks of a labelled graph into classes of isomorphic ones, by structural hash. Operators in ``skip``
    do not count."""
    members: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.meta["block"] is not None and node.target not in skip:
            members[node.meta["block"]].append(node)
    classes: dict[str, list[str]] = defaultdict(list)
    for path, nodes in members.items():
        classes[_hash(nodes)].append(path)
    return tuple(
        BlockClass(pattern(paths[0]), tuple(paths), tuple(tuple(members[p]) for p in paths))
        for paths in classes.values()
    )


def _same_call(node: fx.Node, first: fx.Node) -> bool:
    number = stream_argument(node.target)
    return number is None or node.args[number] == first.args[number]


def first_of(classes: Iterable[BlockClass]) -> dict[fx.Node, fx.Node]:
    """For the nodes of all blocks but the first of their class the counterpart there, where it is the same call: random
    operators with numbers of their own are left out."""
    return {
        node: first
        for c in classes
        for nodes in c.nodes[1:]
        for node, first in zip(nodes, c.nodes[0], strict=True)
        if _same_call(node, first)
    }
