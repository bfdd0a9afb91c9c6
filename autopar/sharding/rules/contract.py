"""One rank's einsum as a single ``mm`` where it is one: the einsum exists for its factors, ``mm`` for its speed.

``torch.einsum`` goes through ``bmm`` with a batch of one, which takes a fifth longer on CPU, and copies operands that
``mm`` reads transposed.
"""

from __future__ import annotations

import math
from typing import Any

from autopar.sharding.rule import Local
from autopar.sharding.rules.common import aten


def _matrix(local: Local, index: int, term: str, rows: str, columns: str, sizes: dict[str, int]) -> Any:
    """Operand ``index`` as the matrix of ``rows`` by ``columns``, without a copy where its dims allow, else with one
    that moves runs of its last dim: ``mm`` reads a matrix transposed as well."""
    x = local.operands[index]
    is_turned = bool(rows and columns) and term != rows + columns and term[-1] in rows
    outer, inner = (columns, rows) if is_turned else (rows, columns)
    if term != outer + inner:
        x = local.emit(aten.permute.default, x, [term.index(f) for f in outer + inner])
    x = local.emit(aten.reshape.default, x, [math.prod(sizes[f] for f in group) for group in (outer, inner)])
    return local.emit(aten.t.default, x) if is_turned else x


def localize_einsum(local: Local) -> Any:
    """The product of two operands with nothing but rows, columns and contracted factors; any other einsum as it is."""
    left, _, result = local.call.args[0].replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or any(len(set(t)) != len(t) for t in (*terms, result)):
        return local.default()
    a, b = terms
    sizes = dict(zip(a, local.operand_shape(0), strict=True))
    if any(sizes.setdefault(f, n) != n for f, n in zip(b, local.operand_shape(1), strict=True)):
        return local.default()
    rows, columns = ("".join(f for f in t if f in result) for t in terms)
    inner = "".join(f for f in a if f not in result)
    if set(rows) & set(columns) or set(inner) != {f for f in b if f not in result}:
        return local.default()
    first = _matrix(local, 0, a, rows, inner, sizes)
    second = _matrix(local, 1, b, inner, columns, sizes)
    if result == columns + rows and rows and columns:  # the transposed product comes out in order
        swapped = (local.emit(aten.t.default, second), local.emit(aten.t.default, first))
        return local.emit(aten.reshape.default, local.emit(aten.mm.default, *swapped), [sizes[f] for f in result])
    product = local.emit(aten.mm.default, first, second)
    product = local.emit(aten.reshape.default, product, [sizes[f] for f in rows + columns])
    if result == rows + columns:
        return product
    return local.emit(aten.permute.default, product, [(rows + columns).index(f) for f in result])
