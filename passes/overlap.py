"""Orders the collectives of parameters and gradients so that they run beside the computation.

Functional collectives run on their own until their ``wait_tensor``, so where a collective starts and where it is waited
for is only a matter of order. A gather starts when the one before it has arrived: beside the computation with those
parameters, one block ahead. A reduction starts as soon as what it reduces is there. A reduce-scatter is waited for when
the next one starts, because its operand, the whole gradients of a block, is held until then; an all-reduce, which needs
no more memory than the gradients themselves, at the end. What goes round a ring starts as soon as it is there, beside
the computation with it.

Invariant: the graph computes the same values, and at any time the parameters of at most two buckets are there gathered
and the operand of at most one reduce-scatter of gradients is in flight.
"""

from __future__ import annotations

import itertools
import math

from torch import fx

from autopar.passes.bucket import piece_of
from autopar.passes.collectives import PERMUTE, REDUCE_SCATTER, WAIT
from autopar.passes.order import reorder

Places = dict[fx.Node, tuple[float, ...]]


def overlap(graph: fx.Graph) -> None:
    """Reorder a graph in place; `bucket.bucket` comes first."""
    found = [(node, piece) for node in graph.nodes if (piece := piece_of(node)) is not None]
    gathers = [node for node, piece in found if piece.purpose == "parameters"]
    reductions = [node for node, piece in found if piece.purpose == "gradients"]
    hops = graph.find_nodes(op="call_function", target=PERMUTE)
    if not found and not hops:
        return
    places = _places(graph)
    for reduction in reductions:
        _want(places, reduction, (-1,))
        places[_wait(reduction)] = (math.inf,)
    reorder(graph, places)
    places = _places(graph)
    _start_ahead(gathers, places)
    for hop in hops:
        places[hop] = (places[hop.all_input_nodes[0]][0] + 0.25,)
    scatters = [node for node in graph.nodes if node in set(reductions) and node.target is REDUCE_SCATTER]
    for scatter, following in itertools.pairwise(scatters):
        places[_wait(scatter)] = (places[following][0] - 0.5,)
    reorder(graph, places)


def _places(graph: fx.Graph) -> Places:
    return {node: (float(i),) for i, node in enumerate(graph.nodes)}


def _wait(collective: fx.Node) -> fx.Node:
    """Where a collective is waited for."""
    (wait,) = collective.users
    assert wait.target is WAIT
    return wait


def _start_ahead(gathers: list[fx.Node], places: Places) -> None:
    """Start every gather when the one before it has arrived, the first at once."""
    begin = -1.0
    for gather in sorted(gathers, key=lambda node: places[_wait(node)]):
        _want(places, gather, (begin,))
        begin = places[_wait(gather)][0] + 0.5


def _want(places: Places, node: fx.Node, place: tuple[float, ...]) -> None:
    """Want a collective at ``place``, or where it is if that is earlier, and with it what its operand is packed of."""
    if places[node] <= place:
        return
    places[node] = place
    for arg in node.all_input_nodes:
        if arg.op == "call_function" and arg.meta.get("piece") is not None:
            _want(places, arg, place)
