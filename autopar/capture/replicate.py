"""Puts the nodes of a block in the place of the marker that stands for blocks like it (see `repeats`).

The graph is in normal form already. Two consecutive periods of traced blocks are compared node by node: operators,
arguments, specs, strides, modules and directions must agree, and what flows in from outside must be, in both, the same
node, the block's own parameter, the one activation, or the one gradient. Nothing may leave a block but its activation,
its gradient and the gradients of its parameters. Then every block of the marker is a copy of the second period's.

Normal form looks through views and products of neighbouring blocks, which it cannot at a marker. So what passes from
block to block must come from an operator that nothing looks through, or go to operators that look through nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar._compat import pytree
from autopar.capture.blocks import block_classes, stream_argument
from autopar.capture.graph import BlockClass, Buffer, Parameter
from autopar.capture.normalize import SEEN_THROUGH
from autopar.capture.repeats import Differs, Repeat, marker, marker_backward

MARKER, MARKER_BACKWARD = marker._opoverload, marker_backward._opoverload
#: What normal form rewrites by what it reads: sums look through views, and nothing looks through sums.
_LOOKING = SEEN_THROUGH | {torch.ops.aten.sum.dim_IntList}
_Meta = dict[str, Any]


@dataclass(frozen=True)
class _Block:
    """A traced block: its nodes in graph order, and its parameters and buffers by their names inside it."""

    index: int
    path: str
    nodes: tuple[fx.Node, ...]
    held: dict[str, fx.Node]
    gradients: dict[str, fx.Node]


@dataclass(frozen=True)
class _Template:
    """A block to copy. ``enters`` and ``leaves`` are the activation that flows in and out, the other two its gradient
    (None without a backward); ``late`` are the nodes of the backward, ``relative`` those whose random stream counts
    from the block's first."""

    block: _Block
    enters: fx.Node
    leaves: fx.Node
    gradient_enters: fx.Node | None
    gradient_leaves: fx.Node | None
    early: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]
    relative: frozenset[fx.Node]


@dataclass(frozen=True)
class _Marker:
    """What stands for the blocks of a container: ``forward`` and ``backward`` (None without one) are its operators,
    ``results`` the nodes that take the results of single blocks out of ``forward``, by place; unread ones are left
    out."""

    forward: fx.Node
    results: dict[int, fx.Node]
    backward: fx.Node | None


@dataclass(frozen=True)
class _Boundary:
    """What flows into a block and, in the block a period later, into its counterpart."""

    activations: tuple[fx.Node, fx.Node]
    gradients: tuple[fx.Node, fx.Node] | None
    relative: frozenset[fx.Node]


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Differs(reason)


# -- reading the trace ------------------------------------------------------------------------------------------------


class _Trace:
    """The graph with markers, and where everything is in it."""

    def __init__(
        self, graph: fx.Graph, parameters: Sequence[Parameter], buffers: Sequence[Buffer], blocks: Sequence[BlockClass]
    ) -> None:
        self.graph, self.parameters = graph, parameters
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.members = {path: nodes for c in blocks for path, nodes in zip(c.paths, c.nodes, strict=True)}
        self.held = {p.name: p.placeholder for p in parameters} | {b.name: b.placeholder for b in buffers}
        self.gradients = {p.name: p.gradient for p in parameters if p.gradient is not None}

    def marker(self, repeat: Repeat) -> _Marker:
        """The marker of a container. Its operators come from the first of its blocks."""
        _require(set(repeat.markers) <= repeat.streams.keys(), "a block is not called")
        forward, backward = (
            [n for n in self.graph.find_nodes(op="call_function", target=target) if n.meta["block"] == first]
            for target, first in zip((MARKER, MARKER_BACKWARD), [repeat.block(repeat.first)] * 2, strict=True)
        )
        _require(len(forward) == 1 and len(backward) <= 1, "the results of blocks are not read")
        results = {node.args[1]: node for node in forward[0].users}
        return _Marker(forward[0], results, backward[0] if backward else None)

    def block(self, repeat: Repeat, index: int) -> _Block:
        """One traced block."""
        path = repeat.block(index)
        _require(path in self.members, f"{path} computes nothing")

        def inside(named: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
            prefix = path + "."
            return {name.removeprefix(prefix): node for name, node in named.items() if name.startswith(prefix)}

        return _Block(index, path, self.members[path], inside(self.held), inside(self.gradients))


def _form(node: fx.Node) -> Any:
    """Shape, dtype and stride of everything that a node yields."""
    leaves = pytree.tree_leaves(node.meta["val"])
    return [(v.shape, v.dtype, v.stride()) if isinstance(v, Tensor) else v for v in leaves]


def _compare(a: _Block, b: _Block, streams: Mapping[int, int]) -> _Boundary:
    """Check that two blocks are copies of one another. Raises Differs where they are not."""
    _require(len(a.nodes) == len(b.nodes) and a.held.keys() == b.held.keys(), f"{a.path} and {b.path} differ")
    same = dict(zip(b.nodes, a.nodes, strict=True)) | {b.held[name]: node for name, node in a.held.items()}
    inside = {*a.nodes, *a.held.values()}
    flows: dict[fx.Node, fx.Node] = {}
    relative = set()
    for x, y in zip(a.nodes, b.nodes, strict=True):
        where = f"{x} and {y} differ"
        _require(x.target is y.target and _form(x) == _form(y), where)
        _require(x.meta["backward"] == y.meta["backward"], where)
        _require(x.meta["module"].removeprefix(a.path) == y.meta["module"].removeprefix(b.path), where)
        left, right = pytree.tree_flatten((x.args, x.kwargs)), pytree.tree_flatten((y.args, y.kwargs))
        _require(left[1] == right[1], where)
        number = stream_argument(x.target)
        if number is not None and x.args[number] != y.args[number]:
            offsets = x.args[number] - streams[a.index], y.args[number] - streams[b.index]  # type: ignore[operator]
            _require(offsets[0] == offsets[1], where)
            relative.add(y)
            left, right = (pytree.tree_flatten(n.args[:number] + n.args[number + 1 :]) for n in (x, y))
        for v, w in zip(left[0], right[0], strict=True):
            if not isinstance(w, fx.Node):
                _require(type(v) is type(w) and v == w, where)
                continue
            if w not in same and v not in inside:
                same[w] = v
                flows |= {} if v is w else {w: v}
            _require(same.get(w) is v, where)
    _require(a.gradients.keys() == b.gradients.keys(), f"the gradients of {a.path} and {b.path} differ")
    _require(all(same.get(b.gradients[n]) is g for n, g in a.gradients.items()), f"gradients of {b.path} differ")
    return _boundary(b, flows, frozenset(relative))


def _boundary(block: _Block, flows: Mapping[fx.Node, fx.Node], relative: frozenset[fx.Node]) -> _Boundary:
    forward = [(v, w) for w, v in flows.items() if not w.meta["backward"]]
    backward = [(v, w) for w, v in flows.items() if w.meta["backward"]]
    _require(len(forward) == 1 and len(backward) <= 1, f"more than one tensor flows through {block.path}")
    return _Boundary(forward[0], backward[0] if backward else None, relative)


def _opaque(node: fx.Node) -> bool:
    """Whether normal form never looks through ``node``."""
    return node.op == "call_function" and node.target not in SEEN_THROUGH


def _apart(node: fx.Node, readers: Iterable[fx.Node]) -> bool:
    """Whether normal form has nothing to rewrite between ``node`` and its ``readers``."""
    return _opaque(node) or all(reader.op == "call_function" and reader.target not in _LOOKING for reader in readers)


def _templates(trace: _Trace, repeat: Repeat, marker: _Marker) -> list[_Template]:
    """The second period of traced blocks, proved equal to the first."""
    start, middle = repeat.first - 2 * repeat.period, repeat.first - repeat.period
    blocks = {i: trace.block(repeat, i) for i in range(start, repeat.first)}
    bounds = [_compare(blocks[i], blocks[i + repeat.period], repeat.streams) for i in range(start, middle)]
    enters = [b.activations[0] for b in bounds] + [b.activations[1] for b in bounds] + [marker.forward.args[0]]
    grads = [b.gradients[k] if b.gradients else None for k in (0, 1) for b in bounds]
    found = []
    for k in range(repeat.period, 2 * repeat.period):
        block, bound = blocks[start + k], bounds[k - repeat.period]
        stops = {grads[k] is None, grads[k - 1] is None, marker.backward is None}
        _require(len(stops) == 1, "gradients stop inside the blocks")
        leaves = enters[k + 1]
        assert isinstance(leaves, fx.Node)
        border = trace.position[marker.forward]
        early = tuple(n for n in block.nodes if trace.position[n] < border)
        template = _Template(
            block,
            bound.activations[1],
            leaves,
            grads[k],
            grads[k - 1],
            early,
            block.nodes[len(early) :],
            bound.relative,
        )
        _check_template(trace, template, blocks[start + k - 1])
        found.append(template)
    return found


def _check_template(trace: _Trace, template: _Template, before: _Block) -> None:
    """Nothing leaves a block but its activation, its gradient and those of its parameters."""
    block, nodes, output = template.block, set(template.block.nodes), trace.graph.output_node()
    through = [n for n in (template.leaves, template.gradient_leaves) if n is not None]
    _require(all(n in nodes for n in through), f"something else flows through {block.path}")
    inside = nodes | {output}
    _require(
        all(user in inside for n in block.held.values() for user in n.users), f"others read what {block.path} holds"
    )
    plain = set(output.args[0][: output.meta["plain"]])  # type: ignore[index,arg-type]
    gradients = set(block.gradients.values())
    for node in nodes:
        outside = [user for user in node.users if user not in nodes]
        if node is template.gradient_leaves:
            outside = [user for user in outside if user.meta["block"] != before.path]
        if node is template.leaves:
            following = [user for user in outside if user is not output]
            _require(len({user.meta["block"] for user in following}) == 1, f"{node} is read outside of blocks")
            continue
        allowed = node in gradients and node not in plain
        _require(all(user is output and allowed for user in outside), f"{node} is read outside of {block.path}")


def _check_marker(trace: _Trace, repeat: Repeat, templates: Sequence[_Template], marker: _Marker) -> None:
    """Nothing happens to the results of single blocks, and the marker passes on what a block passes on."""
    output, (first, last) = trace.graph.output_node(), (repeat.block(repeat.first), repeat.markers[-1])
    form = _form(templates[-1].leaves)
    _require(_form(templates[0].enters) == form, "blocks change what flows through")
    following = {i: [user for user in n.users if user is not output] for i, n in marker.results.items()}
    readers = following.pop(repeat.count - 1, [])
    _require(not any(following.values()), "something happens between blocks")
    _require({user.meta["block"] for user in readers} == {repeat.block(last + 1)}, "the last block is not followed")
    _require(_form(marker.results[repeat.count - 1]) == form, "blocks change what flows through")
    leaving = [(templates[-1].leaves, readers)]
    inside = zip(templates, [*templates[1:], templates[0]], strict=True)
    leaving += [(t.leaves, _readers(after, after.enters)) for t, after in inside]
    if marker.backward is not None:
        leaving += _check_gradients(trace, repeat, templates, marker.backward)
    _require(all(_apart(node, readers) for node, readers in leaving), f"{first} is not apart from its neighbours")


def _readers(template: _Template, node: fx.Node) -> list[fx.Node]:
    """The nodes of a template that read ``node``."""
    inside = set(template.block.nodes)
    return [user for user in node.users if user in inside]


def _check_gradients(
    trace: _Trace, repeat: Repeat, templates: Sequence[_Template], marker: fx.Node
) -> list[tuple[fx.Node, list[fx.Node]]]:
    """As `_check_marker`, for the marker of the backward; the gradients that pass from block to block, with what reads
    each."""
    before = repeat.block(repeat.first - 1)
    _require({user.meta["block"] for user in marker.users} == {before}, "the gradient goes astray")
    known = trace.position[marker]
    leaving = []
    for template, earlier in zip(templates, [templates[-1], *templates[:-1]], strict=True):
        assert template.gradient_enters is not None and template.gradient_leaves is not None
        assert earlier.gradient_enters is not None
        inner = {*template.block.nodes, template.gradient_enters}
        outer = {arg for node in template.late for arg in node.all_input_nodes} - inner
        _require(all(trace.position[n] < known for n in outer), "a shared gradient value comes too late")
        leaving.append((template.gradient_leaves, _readers(earlier, earlier.gradient_enters)))
    entering: Any = marker.args[0]
    leaving.append((entering, _readers(templates[-1], templates[-1].gradient_enters)))  # type: ignore[arg-type]
    leaving.append((templates[0].gradient_leaves, list(marker.users)))  # type: ignore[arg-type]
    return leaving


# -- writing the copies -----------------------------------------------------------------------------------------------


class _Copier:
    """Writes the copies of one template's nodes for one block."""

    def __init__(self, trace: _Trace, repeat: Repeat, template: _Template, index: int) -> None:
        self.graph, self.template = trace.graph, template
        self.path, self.cut = repeat.block(index), len(template.block.path)
        self.shift = repeat.streams[index] - repeat.streams[template.block.index]
        prefix = self.path + "."
        self.env = {node: trace.held[prefix + name] for name, node in template.block.held.items()}

    def copy(self, nodes: Sequence[fx.Node], where: fx.Node, entering: fx.Node | None, value: fx.Node) -> None:
        """Copy ``nodes`` to before the marker ``where``, with ``value`` in the place of ``entering``."""
        if entering is not None:
            self.env[entering] = value
        env = self.env
        with self.graph.inserting_before(where):
            for node in nodes:
                copied = self.graph.node_copy(node, lambda n: env.get(n, n))
                copied.meta = self._meta(node.meta)
                if node in self.template.relative:
                    number = stream_argument(node.target)
                    assert number is not None
                    copied.update_arg(number, copied.args[number] + self.shift)  # type: ignore[operator]
                env[node] = copied

    def _meta(self, meta: _Meta) -> _Meta:
        return {
            "val": meta["val"],
            "module": self.path + meta["module"][self.cut :],
            "block": self.path,
            "backward": meta["backward"],
        }


def _expand(trace: _Trace, repeat: Repeat) -> list[_Copier]:
    """Replace the marker of one container; the copies made, in order."""
    marker = trace.marker(repeat)
    templates = _templates(trace, repeat, marker)
    _check_marker(trace, repeat, templates, marker)
    by_index = {t.block.index: t for t in templates}
    copiers = [_Copier(trace, repeat, by_index[repeat.template(i)], i) for i in repeat.markers]
    value: Any = marker.forward.args[0]
    for copier in copiers:
        copier.copy(copier.template.early, marker.forward, copier.template.enters, value)
        value = copier.env[copier.template.leaves]
    for place, node in marker.results.items():
        node.replace_all_uses_with(copiers[place].env[copiers[place].template.leaves])
        trace.graph.erase_node(node)
    trace.graph.erase_node(marker.forward)
    if marker.backward is not None:
        value = marker.backward.args[0]
        for copier in reversed(copiers):
            copier.copy(copier.template.late, marker.backward, copier.template.gradient_enters, value)
            assert copier.template.gradient_leaves is not None
            value = copier.env[copier.template.gradient_leaves]
        marker.backward.replace_all_uses_with(value)
        trace.graph.erase_node(marker.backward)
    return copiers


def _number(path: str) -> int:
    return int(path.rpartition(".")[2])


def _extend(classes: Sequence[BlockClass], copiers: Sequence[_Copier]) -> tuple[BlockClass, ...]:
    """The classes with the copies in them."""
    found = []
    for cls in classes:
        members = dict(zip(cls.paths, cls.nodes, strict=True))
        members |= {
            c.path: tuple(c.env[n] for n in c.template.block.nodes)
            for c in copiers
            if c.template.block.path in cls.paths
        }
        paths = tuple(sorted(members, key=_number) if len(members) > len(cls.paths) else cls.paths)
        found.append(BlockClass(cls.name, paths, tuple(members[p] for p in paths)))
    return tuple(found)


def put_copies(
    graph: fx.Graph, repeats: Sequence[Repeat], parameters: tuple[Parameter, ...], buffers: Sequence[Buffer]
) -> tuple[tuple[Parameter, ...], tuple[BlockClass, ...]]:
    """Replace the markers in a labelled graph in normal form by copies of the blocks before them.

    Returns the parameters with the gradients that their copies give them, which the graph then returns as well, and the
    classes of isomorphic blocks. Raises Differs where blocks may not be alike; the graph is then of no use.
    """
    for node in graph.find_nodes(op="call_function", target=MARKER):
        for result in node.users:
            result.meta["block"] = None  # or the marked block would have nodes
    classes = block_classes(graph, skip=(MARKER, MARKER_BACKWARD))
    trace = _Trace(graph, parameters, buffers, classes)
    copiers: list[_Copier] = []
    for repeat in repeats:
        copiers += _expand(trace, repeat)
    made = {f"{c.path}.{name}": c.env[node] for c in copiers for name, node in c.template.block.gradients.items()}
    parameters = tuple(replace(p, gradient=made.get(p.name, p.gradient)) for p in parameters)
    output: fx.Node = graph.output_node()
    plain: Any = output.args[0]
    output.args = ((*plain[: output.meta["plain"]], *(p.gradient for p in parameters if p.gradient is not None)),)
    return parameters, _extend(classes, copiers)
