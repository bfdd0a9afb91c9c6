"""Lets a graph keep sums over its runs: what it returns for the first time is its own, later runs add to that in place.

Added when the whole graph has run, the gradients of a micro-batch would all be there beside their sums. Here each is
added as soon as it is there, as autograd does, and is gone.

Invariant: the outputs are equal, those added to being sums after the run; nothing but `aten.add_` on sums writes to a
tensor that exists, and no tensor that is added to is part of another, or of what the graph is given.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterable

import torch
from torch import fx

from autopar._compat import OpOverload
from autopar.passes.collectives import WAIT, aten
from autopar.sharding.operators import VIEWS

#: Key of the ``meta`` of nodes that keep a sum: they are nobody's computation.
KEEPS_SUM = "keeps_sum"

#: Views of all elements of what they look at.
_WHOLE = (VIEWS | {aten.contiguous.default, WAIT}) - {
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}


def is_view(node: fx.Node) -> bool:
    """Whether a call may return, or return parts of, what it is given."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if node.target in VIEWS or node.target is WAIT:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.alias_info is not None for a in schema.arguments)


def base(node: fx.Node) -> fx.Node:
    """The node whose storage a value may look at: one that is given or computed."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def shared(values: Iterable[fx.Node], others: Iterable[fx.Node] = ()) -> list[bool]:
    """Of every one of ``values`` whether it may not be written to: it is given to the graph, has elements in common
    with one before or one of ``others``, is a part of something larger, or repeats its elements."""
    held = {base(other) for other in others}
    found = []
    for node in values:
        own = node
        while own.target in _WHOLE:
            own = own.all_input_nodes[0]
        source = base(own)
        found.append(own is not source or source.op != "call_function" or source in held)
        held.add(source)
    return found


def keep_sums(module: fx.GraphModule, owned: Collection[int], added: Collection[int]) -> fx.GraphModule:
    """``module`` with the outputs at the places ``owned`` as tensors that nothing else looks at, and those at the
    places ``added`` added to sums: it is given those besides, in the order of places, and does not return them."""
    graph = copy.deepcopy(module.graph)
    outputs: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    returned = dict(enumerate(outputs))
    others = [node for i, node in enumerate(outputs) if i not in owned and i not in added]
    places = sorted(owned)
    for i, is_shared in zip(places, shared([outputs[i] for i in places], others), strict=True):
        if is_shared:
            returned[i] = _after(graph, outputs[i], aten.clone.default, (outputs[i],))
            returned[i].kwargs = {"memory_format": torch.contiguous_format}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for i in sorted(added):
        with graph.inserting_before(first):
            total = graph.placeholder(f"sum_{i}")
        _after(graph, outputs[i], aten.add_.Tensor, (total, outputs[i]))
        del returned[i]
    graph.output_node().args = (tuple(returned.values()),)
    graph.lint()
    made = fx.GraphModule(torch.nn.Module(), graph, class_name=type(module).__name__)
    made.meta.update(module.meta)
    return made


def _after(graph: fx.Graph, node: fx.Node, target: OpOverload, args: tuple[fx.Node, ...]) -> fx.Node:
    """A call as soon as ``node`` is there."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    with graph.inserting_before(following):
        made = graph.call_function(target, args)
    made.meta = {**node.meta, KEEPS_SUM: True}
    return made
