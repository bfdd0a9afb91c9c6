"""Indices that count through a whole dim, and factories: the normal form computes the same and keeps the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_harness import check
from rule_samples import Draw
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar.capture.indexing import factories_without_operand, resolve_counting_indices
from autopar.sharding.operators import Value, read_operators

aten = torch.ops.aten


def _normal(function: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    """``function`` traced, its indices resolved and factories without needless operands."""
    module = make_fx(function, tracing_mode="fake")(*args)
    resolve_counting_indices(module.graph)
    factories_without_operand(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # in normal form a view is of shapes, not of strides
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def _targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def _batch_dims(module: fx.GraphModule) -> frozenset[int]:
    """The dims of the result that carry the first dim of the first input, as the rules have it."""
    for node in module.graph.nodes:
        node.meta |= {"module": "", "block": None, "backward": False}
    first, *others = module.graph.find_nodes(op="placeholder")
    batch = {first: 0, **{n: 0 for n in others if n.meta["val"].shape[:1] == first.meta["val"].shape[:1]}}
    (result,) = module.graph.output_node().all_input_nodes
    return read_operators(module.graph, batch, {}).batch_dims[Value(result)]


def _check_shards(module: fx.GraphModule, *inputs: Tensor) -> None:
    """Every operator of the graph, split in every way that its rule has, computes what it computes on the whole."""

    class Sharded(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            check(target, args, kwargs)
            return super().call_function(target, args, kwargs)

    Sharded(module).run(*inputs)


def _counting(size: int, position: int, ndim: int, style: int) -> Tensor:
    """0, 1, ... along ``position`` of ``ndim`` dims, written in one of several ways."""
    shape = [size if p == position else 1 for p in range(ndim)]
    counted = torch.arange(size) if style != 1 else torch.arange(0, size, dtype=torch.int32).to(torch.int64)
    counted = counted + 0 if style == 2 else counted
    return counted.view(shape)


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_counting_indices_are_resolved(data: st.DataObject) -> None:
    """``table[indices]`` and its gradient, and a put in place: the same numbers, no index along a counted dim."""
    d = Draw(data)
    table = d.real([d.pick([2, 3, 4]) for _ in range(d.integer(1, 4))])
    dims = sorted(d.dims(range(table.dim())))
    dropped = None if d.flag() else d.pick(dims)
    counted = [x for x in dims if x != dropped]
    ndim = len(counted) + d.integer(0, 2) if len(counted) < len(dims) else len(counted)
    places = d.dims(range(ndim), low=ndim)[: len(counted)]
    picked = [x for x in dims if x not in counted]
    style = d.integer(0, 2)
    varying = [d.flag() for _ in range(ndim)]
    sizes = [next((table.shape[c] for c, p in zip(counted, places, strict=True) if p == q), d.pick([1, 2, 5]))
             for q in range(ndim)]  # fmt: skip
    other = [n if v or q not in places else 1 for q, (n, v) in enumerate(zip(sizes, varying, strict=True))]
    index = d.whole(other, -table.shape[picked[0]], table.shape[picked[0]]) if picked else d.whole([1], 0, 1)
    index = index.to(d.pick([torch.int64, torch.int32]))

    def indices(index: Tensor) -> tuple[Any, ...]:
        found = {c: _counting(table.shape[c], p, ndim, style) for c, p in zip(counted, places, strict=True)}
        return tuple(found.get(x, index if x in picked else slice(None)) for x in range(table.dim()))

    def look_up(table: Tensor, index: Tensor) -> Tensor:
        return aten.index.Tensor(table, [None if isinstance(i, slice) else i for i in indices(index)])

    def add(grad: Tensor, index: Tensor) -> Tensor:
        places = [None if isinstance(i, slice) else i for i in indices(index)]
        return aten.index_put.default(grad.new_zeros(table.shape), places, grad, True)

    found = _normal(look_up, table, index)
    expected = look_up(table, index)
    assert torch.equal(found(table, index), expected)
    added = _normal(add, expected, index)
    torch.testing.assert_close(added(expected, index), add(expected, index), rtol=1e-12, atol=1e-12)
    if counted:
        for module in (found, added):
            left = [n for n in module.graph.nodes if n.target in (aten.index.Tensor, aten.index_put.default)]
            assert all(sum(i is not None for i in n.args[1]) == 1 for n in left), module.code
        if not picked:
            assert not {*_targets(found), *_targets(added)} & {aten.index.Tensor, aten.index_put.default}


LOOKUPS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor], Any]] = {
    "a row of each sample": ((4, 6, 8), lambda x, i: x[torch.arange(4), i], aten.gather.default),
    "a class of each token": (
        (4, 6, 8), lambda x, i: x[torch.arange(4)[:, None], torch.arange(6)[None], i[:, None]], aten.gather.default),
    "positions of all samples": (
        (4, 6), lambda x, i: x[torch.arange(4)[:, None], torch.arange(1, 4)[None]], aten.index.Tensor),
    "all of all samples": ((4, 6), lambda x, i: x[torch.arange(4)[:, None, None], torch.arange(6)], None),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_keeps_the_batch(name: str) -> None:
    """Forward and backward, with an index that counts from the end; each operator right when split."""
    shape, look_up, target = LOOKUPS[name]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    index = torch.tensor([0, -1, 5, -6])
    module = _normal(look_up, x, index)
    kinds = {aten.gather.default, aten.index.Tensor} & set(_targets(module))
    assert kinds == ({target} if target else set())
    assert torch.equal(module(x, index), look_up(x, index))
    assert _batch_dims(module) == {0}
    _check_shards(module, x, index)

    def backward(grad: Tensor, index: Tensor) -> Tensor:
        leaf = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(look_up(leaf, index), leaf, grad)[0]

    grad = torch.randn(look_up(x, index).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    module = _normal(backward, grad, index)
    assert torch.equal(module(grad, index), backward(grad, index))
    assert _batch_dims(module) == {0}
    _check_shards(module, grad, index)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_put_into_what_is_there(accumulate: bool) -> None:
    """Values, broadcast, put into a table that is not zero."""
    table, values = torch.randn(4, 6, 8), torch.randn(8)
    index = torch.tensor([1, -1, 0, 3])

    def put(table: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return aten.index_put.default(table, [torch.arange(4), index], values, accumulate=accumulate)

    module = _normal(put, table, index, values)
    assert (aten.scatter_add.default if accumulate else aten.scatter.src) in _targets(module)
    assert torch.equal(module(table, index, values), put(table, index, values))
    assert _batch_dims(module) == {0}


@pytest.mark.parametrize("lookup", [
    lambda x, i: x[torch.arange(1, 5), i],  # does not start at the first
    lambda x, i: x[torch.arange(3), i[:3]],  # nor reach the last
    lambda x, i: x[2 * torch.arange(2), i[:2]],
    lambda x, i: x[i, i],
])  # fmt: skip
def test_what_does_not_count_through_the_whole_is_left(lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, index = torch.randn(5, 6), torch.tensor([0, 1, 2, 3])
    module = _normal(lookup, x, index)
    assert aten.index.Tensor in _targets(module)
    assert torch.equal(module(x, index), lookup(x, index))


def test_a_place_out_of_bounds_is_an_error() -> None:
    x = torch.randn(4, 6)
    module = _normal(lambda x, i: x[torch.arange(4), i], x, torch.tensor([0, 1, 2, 3]))
    for place in (6, -7):
        with pytest.raises(RuntimeError, match="out of bounds"):
            module(x, torch.tensor([0, 1, 2, place]))


FACTORIES: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "zeros": lambda x, shape: x.new_zeros(shape),
    "ones in int64": lambda x, shape: x.new_ones(shape, dtype=torch.int64),
    "full": lambda x, shape: x.new_full(shape, 2.5),
}


@pytest.mark.parametrize(("name", "shape"), [*itertools.product(FACTORIES, [(), (6,), (4, 3), (6, 8)])])
def test_a_factory_keeps_its_operand_only_for_the_batch(name: str, shape: tuple[int, ...]) -> None:
    """Of ``x`` [4, 6, 8] a scalar and what has another first dim need nothing; what has the first dim has the batch."""
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    make = FACTORIES[name]
    module = _normal(lambda x: make(x, [*shape]), x)
    batch = shape[:1] == (4,)
    assert bool(module.graph.find_nodes(op="placeholder")[0].users) == batch
    expected = make(x, [*shape])
    assert torch.equal(module(x), expected) and module(x).dtype == expected.dtype
    assert _batch_dims(module) == ({0} if batch else set())


def test_a_scalar_like_another_needs_nothing() -> None:
    x = torch.tensor(3.0)
    module = _normal(lambda x: torch.ones_like(x) + torch.full_like(x, 2.0, dtype=torch.float64), x)
    assert not module.graph.find_nodes(op="placeholder")[0].users
    assert module(x) == 3.0 and module(x).dtype == torch.float64


def test_a_table_whose_rows_are_looked_up_has_no_batch() -> None:
    """As many rows as samples: the gradient of ``table[labels]`` is a sum over samples all the same."""

    def backward(grad: Tensor, labels: Tensor) -> Tensor:
        return aten.index_put.default(grad.new_zeros(4, 8), [labels], grad, True)

    grad, labels = torch.randn(4, 8), torch.tensor([1, 1, 0, 3])
    module = _normal(backward, grad, labels)
    assert aten.zeros.default in _targets(module)
    assert _batch_dims(module) == set()
    assert all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(module(grad, labels)))
    assert torch.equal(module(grad, labels), backward(grad, labels))
