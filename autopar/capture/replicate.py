"""Puts the nodes of a block in the place of the markers that stand for blocks like it (see `repeats`).

The graph is in normal form already. Two consecutive periods of traced blocks are compared node by node: operators,
arguments, specs, strides, modules and directions must agree, and what flows in from outside must be, in both, the same
node, the block's own parameter, the one activation, or the one gradient. Nothing may leave a block but its activation,
its gradient and the gradients of its parameters. Then every marker's block is a copy of the second period's.

Normal form looks through views and products of neighbouring blocks, which it cannot at a marker. So what passes from
block to block must come from an operator that nothing looks through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from autopar._compat import pytree
from autopar.capture.blocks import block_classes, stream_argument
from autopar.capture.graph import BlockClass, Buffer, Parameter
from autopar.capture.normalize import SEEN_THROUGH
from autopar.capture.repeats import Differs, Repeat, marker, marker_backward

MARKER, MARKER_BACKWARD = marker._opoverload, marker_backward._opoverload
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

    def markers(self, repeat: Repeat, target: Any) -> dict[int, fx.Node]:
        """The markers of a container by block."""
        nodes = [
            n
            for n in self.graph.find_nodes(op="call_function", target=target)
            if n.meta["block"] == repeat.block(n.args[1])
        ]
        found = {n.args[1]: n for n in nodes}
        _require(len(found) == len(nodes), "a block is called twice")
        return found

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


def _templates(
    trace: _Trace, repeat: Repeat, forward: dict[int, fx.Node], backward: dict[int, fx.Node]
) -> list[_Template]:
    """The second period of traced blocks, proved equal to the first."""
    start, middle = repeat.first - 2 * repeat.period, repeat.first - repeat.period
    blocks = {i: trace.block(repeat, i) for i in range(start, repeat.first)}
    bounds = [_compare(blocks[i], blocks[i + repeat.period], repeat.streams) for i in range(start, middle)]
    enters = [b.activations[0] for b in bounds] + [b.activations[1] for b in bounds] + [forward[repeat.first].args[0]]
    grads = [b.gradients[k] if b.gradients else None for k in (0, 1) for b in bounds]
    found = []
    for k in range(repeat.period, 2 * repeat.period):
        block, bound = blocks[start + k], bounds[k - repeat.period]
        _require((grads[k] is None) == (not backward) == (grads[k - 1] is None), "gradients stop inside the blocks")
        leaves = enters[k + 1]
        assert isinstance(leaves, fx.Node)
        border = trace.position[forward[repeat.first]]
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
    """Nothing leaves a block but its activation, its gradient and those of its parameters, and normal form has looked
    through none of them."""
    block, nodes, output = template.block, set(template.block.nodes), trace.graph.output_node()
    through = [n for n in (template.leaves, template.gradient_leaves) if n is not None]
    _require(all(n in nodes and _opaque(n) for n in through), f"{block.path} is not apart from its neighbours")
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


def _check_markers(
    trace: _Trace,
    repeat: Repeat,
    templates: Sequence[_Template],
    forward: dict[int, fx.Node],
    backward: dict[int, fx.Node],
) -> None:
    """Markers follow one another directly, in both directions, and the last one passes what a block passes."""
    indices, output = repeat.markers, trace.graph.output_node()
    _require(set(forward) == set(indices) and set(backward) in (set(), set(indices)), "a block is not called")
    form = _form(templates[-1].leaves)
    for i in indices:
        _require(_form(forward[i]) == form == _form(templates[0].enters), "blocks change what flows through")
        following = {user for user in forward[i].users if user is not output}
        if i + 1 in forward:
            _require(following == {forward[i + 1]}, "something happens between blocks")
            _require(not backward or backward[i].args[0] is backward[i + 1], "something happens between gradients")
        else:
            _require(
                {user.meta["block"] for user in following} == {repeat.block(i + 1)}, "the last block is not followed"
            )
    if backward:
        last, first = backward[indices[-1]], backward[indices[0]]
        gradient = last.args[0]
        assert isinstance(gradient, fx.Node)
        _require(_opaque(gradient), "the gradient of the last block is a view or a product")
        _require(
            {user.meta["block"] for user in first.users} == {repeat.block(indices[0] - 1)}, "the gradient goes astray"
        )
        known = trace.position[last]
        for template in templates:
            inner = {*template.block.nodes, template.gradient_enters}
            outer = {arg for node in template.late for arg in node.all_input_nodes} - inner
            _require(all(trace.position[n] < known for n in outer), "a shared gradient value comes too late")


# -- writing the copies -----------------------------------------------------------------------------------------------


class _Copier:
    """Writes the copies of one template's nodes for one marker."""

    def __init__(self, trace: _Trace, repeat: Repeat, template: _Template, index: int) -> None:
        self.graph, self.template = trace.graph, template
        self.path, self.cut = repeat.block(index), len(template.block.path)
        self.shift = repeat.streams[index] - repeat.streams[template.block.index]
        prefix = self.path + "."
        self.env = {node: trace.held[prefix + name] for name, node in template.block.held.items()}

    def copy(self, nodes: Sequence[fx.Node], where: fx.Node, entering: fx.Node | None) -> None:
        """Copy ``nodes`` to before the marker ``where``, whose argument stands for ``entering``."""
        if entering is not None:
            self.env[entering] = where.args[0]  # type: ignore[assignment]
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


def _put(marker: fx.Node, node: fx.Node | None) -> None:
    assert node is not None
    marker.replace_all_uses_with(node)
    marker.graph.erase_node(marker)


def _expand(trace: _Trace, repeat: Repeat) -> tuple[list[_Copier], list[_Template]]:
    """Replace all markers of one container; the copies made, in order."""
    forward, backward = trace.markers(repeat, MARKER), trace.markers(repeat, MARKER_BACKWARD)
    _require(set(forward) == set(repeat.markers), "a block is not called")
    templates = _templates(trace, repeat, forward, backward)
    _check_markers(trace, repeat, templates, forward, backward)
    by_index = {t.block.index: t for t in templates}
    copiers = [_Copier(trace, repeat, by_index[repeat.template(i)], i) for i in repeat.markers]
    for i, copier in zip(repeat.markers, copiers, strict=True):
        copier.copy(copier.template.early, forward[i], copier.template.enters)
        _put(forward[i], copier.env[copier.template.leaves])
    for i, copier in reversed(list(zip(repeat.markers, copiers, strict=True)) if backward else []):
        copier.copy(copier.template.late, backward[i], copier.template.gradient_enters)
        assert copier.template.gradient_leaves is not None
        _put(backward[i], copier.env[copier.template.gradient_leaves])
    return copiers, templates


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
    classes = block_classes(graph, skip=(MARKER, MARKER_BACKWARD))
    trace = _Trace(graph, parameters, buffers, classes)
    copiers: list[_Copier] = []
    for repeat in repeats:
        copiers += _expand(trace, repeat)[0]
    made = {f"{c.path}.{name}": c.env[node] for c in copiers for name, node in c.template.block.gradients.items()}
    parameters = tuple(replace(p, gradient=made.get(p.name, p.gradient)) for p in parameters)
    output: fx.Node = graph.output_node()
    plain: Any = output.args[0]
    output.args = ((*plain[: output.meta["plain"]], *(p.gradient for p in parameters if p.gradient is not None)),)
    return parameters, _extend(classes, copiers)
