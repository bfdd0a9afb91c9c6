"""The strategies of a few operators, written out by hand: on one axis ``a`` of degree 2, choice: layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_harness import call_of, tensors

from autopar.ops.attention import attention
from autopar.sharding import rule as rules
from autopar.sharding.layout import Mesh, TensorSpec
from autopar.sharding.rules import rule_for
from autopar.sharding.rules.view import reshape_factors

aten, own = torch.ops.aten, torch.ops.autopar


def written(target: Any, *args: Any, mesh: Mesh = Mesh((("a", 2),))) -> dict[str, str]:  # noqa: B008  immutable
    rule = rule_for(call_of(target, *args))
    assert rule is not None
    table: dict[str, str] = {}
    for strategy in rules.strategies(rule, mesh):
        ins, outs = rules.layouts(rule, strategy, mesh)
        name = ",".join(str(c) if c.linear is None else f"partial {sorted(c.linear)}" for c in strategy)
        table[name] = f"{' '.join(map(str, ins))} -> {' '.join(map(str, outs))}"
    return table


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_mm() -> None:
    assert written(aten.mm.default, floats(4, 6), floats(6, 8)) == {
        "-": "[] [] -> []",
        "m": "[0:a] [] -> [0:a]",
        "k": "[1:a] [0:a] -> [partial(sum):a]",
        "n": "[] [1:a] -> [1:a]",
        "partial [0]": "[partial(sum):a] [] -> [partial(sum):a]",
        "partial [1]": "[] [partial(sum):a] -> [partial(sum):a]",
    }
    assert "k" not in written(aten.mm.default, floats(4, 3), floats(3, 8)), "3 does not divide"


def test_einsum_of_a_linear_layer() -> None:
    """Batch and sequence are apart, so that one axis can take each."""
    operands = [floats(2, 4, 6), floats(8, 6)]
    table = written(aten.einsum.default, "bsk,nk->bsn", operands, mesh=Mesh((("a", 2), ("b", 2))))
    assert table["b,s"] == "[0:a, 1:b] [] -> [0:a, 1:b]"
    assert table["b,k"] == "[0:a, 2:b] [1:b] -> [0:a, partial(sum):b]"
    assert table["n,n"] == "[] [0:a+b] -> [2:a+b]"
    assert "b,b" not in table, "a batch of 2 in 4"


def test_view_splits_the_outer_factor_of_a_compound_dim() -> None:
    assert written(aten.view.default, floats(4, 6), [4, 2, 3]) == {
        "-": "[] -> []", "f0": "[0:a] -> [0:a]", "f1": "[1:a] -> [1:a]",
        "partial [0]": "[partial(sum):a] -> [partial(sum):a]",
    }
    merged = written(aten.view.default, floats(2, 4), [8], mesh=Mesh((("a", 2), ("b", 2))))
    assert merged["f0,f1"] == "[0:a, 1:b] -> [0:a+b]"
    assert "f1,f0" in merged and "-,f1" not in merged, "the inner one only where the outer one is used up"


@pytest.mark.parametrize(("source", "target", "expected"), [
    ([6, 4], [24], ("(6) (4)", "(6 4)")),
    ([12], [4, 3], ("(4 3)", "(4) (3)")),
    ([4, 6], [8, 3], ("(4) (2 3)", "(4 2) (3)")),
    ([1, 6, 1], [6], ("() (6) ()", "(6)")),
    ([6, 4], [4, 6], ("(2 3!) (4!)", "(2 2!) (6!)")),  # no boundary but the first half
    ([3, 4, 5], [4, 3, 5], ("(3!) (4!) (5)", "(4!) (3!) (5)")),
])
def test_reshape_factors(source: list[int], target: list[int], expected: tuple[str, str]) -> None:
    ins, outs, sizes, unsplit = reshape_factors(source, target)

    def text(dims: rules.Dims) -> str:
        return " ".join(f"({' '.join(f'{sizes[f]}' + '!' * (f in unsplit) for f in factors)})" for factors in dims)

    assert (text(ins), text(outs)) == expected


def test_embedding() -> None:
    assert written(aten.embedding.default, floats(8, 4), torch.zeros(2, 6, dtype=torch.int64)) == {
        "-": "[] [] -> []",
        "v": "[0:a] [] -> [partial(sum):a]",
        "h": "[1:a] [] -> [2:a]",
        "d0": "[] [0:a] -> [0:a]",
        "d1": "[] [1:a] -> [1:a]",
        "partial [0]": "[partial(sum):a] [] -> [partial(sum):a]",
    }


def test_layer_norm_backward() -> None:
    x, weight = floats(2, 4, 6), floats(6)
    _, mean, rstd = aten.native_layer_norm.default(x, [6], weight, weight, 1e-5)
    table = written(aten.native_layer_norm_backward.default, x, x, [6], mean, rstd, weight, weight, [True, True, False])
    assert table == {
        "-": "[] [] [] [] [] [] -> [] []",
        "d0": "[0:a] [0:a] [0:a] [0:a] [] [] -> [0:a] [partial(sum):a]",
        "d1": "[1:a] [1:a] [1:a] [1:a] [] [] -> [1:a] [partial(sum):a]",
        "partial [0]": "[partial(sum):a] [] [] [] [] [] -> [partial(sum):a] [partial(sum):a]",
    }


def _attention(heads: int, kv_heads: int, causal: bool) -> tuple[Any, ...]:
    q, k = floats(2, heads, 4, 2), floats(2, kv_heads, 4, 2)
    return q, k, k, None, None, None, None, 0.5, causal, 0, False, 0.0, 0.0, 0, []


def test_attention_splits_batch_and_heads() -> None:
    assert written(own.attention.default, *_attention(4, 2, causal=True)) == {
        "-": "[] [] [] -> [] []",
        "b": "[0:a] [0:a] [0:a] -> [0:a] [0:a]",
        "g": "[1:a] [1:a] [1:a] -> [1:a] [1:a]",
        "positions": "[2:a] [] [] -> [2:a] [2:a]",
        "ring": "[2:a] [2:a] [2:a] -> [2:a] [2:a]",
    }


def test_attention_splits_the_group_of_a_single_key_head() -> None:
    args = _attention(4, 1, causal=True)
    assert written(own.attention.default, *args)["r"] == "[1:a] [] [] -> [1:a] [1:a]"
    backward = written(own.attention_backward.default, args[0], *args[:5], *attention(*args), *args[5:])
    assert backward["r"] == "[1:a] [1:a] [] [] [1:a] [1:a] -> [1:a] [partial(sum):a] [partial(sum):a]"


def test_attention_splits_queries_that_know_no_position() -> None:
    assert written(own.attention.default, *_attention(4, 2, causal=False))["s"] == "[2:a] [] [] -> [2:a] [2:a]"


def test_attention_splits_queries_and_keys_together() -> None:
    """On one axis, beside which no other splits either; the gradients of keys are whole then. Of a learned bias nobody
    has the gradient."""
    args = _attention(4, 2, causal=True)
    backward = written(own.attention_backward.default, args[0], *args[:5], *attention(*args), *args[5:])
    assert backward["ring"] == "[2:a] [2:a] [2:a] [2:a] [2:a] [2:a] -> [2:a] [2:a] [2:a]"
    assert backward["positions"].endswith("-> [2:a] [partial(sum):a] [partial(sum):a]")
    both = written(own.attention.default, *args, mesh=Mesh((("a", 2), ("b", 2))))
    assert {name for name in both if "ring" in name} == {
        f"{a},{b}" for a, b in [("ring", x) for x in ("-", "b", "g")] + [(x, "ring") for x in ("-", "b", "g")]}
    bias = (args[0], *args[:4], floats(1, 4, 4, 4), *attention(*args), *args[5:])
    assert "ring" not in written(own.attention_bias_backward.default, *bias)


def test_queries_without_keys_do_not_go_round() -> None:
    """Where they are to attend all keys equally, no rank knows of its own that there is none."""
    q, k, v, _, *rest = _attention(4, 2, causal=True)
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert "ring" in written(own.attention.default, q, k, v, mask, *rest)
    rest[6] = True  # spread
    assert "ring" not in written(own.attention.default, q, k, v, mask, *rest)
    assert "ring" in written(own.attention.default, q, k, v, None, *rest)


def test_adding_a_number_is_not_linear() -> None:
    assert [*written(aten.add.Tensor, floats(4), 1)] == ["-", "d0"]
    assert [*written(aten.add.Tensor, floats(4), floats(4))] == ["-", "d0", "partial [0, 1]"]


def test_op_call_of_a_graph_node() -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(aten.cat.default, ([a, b], 1))
    spec = TensorSpec((2, 3), torch.float32)
    call, operands = rules.op_call(node.target, node.args, node.kwargs, [TensorSpec((2, 6), torch.float32)],
                                   lambda leaf: spec if isinstance(leaf, torch.fx.Node) else None)
    assert operands == [a, b] and call.operands == (spec, spec)
    assert list(call.args[0]) == [rules.Arg(0), rules.Arg(1)] and call.args[1] == 1
    rule = rule_for(call)
    assert rule is not None and [str(c) for c in rules.choices(rule)] == ["-", "d0", "partial"]


def test_tensors_are_found_in_nested_results() -> None:
    assert len(tensors((floats(1), [floats(1), None]))) == 2
