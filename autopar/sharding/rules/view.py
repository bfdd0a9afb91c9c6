"""Views and other rearrangements. All of them are linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.sharding.rule import Arg, Dims, Local, OpCall, Rule, make_rule
from autopar.sharding.rules.common import aten, dim_by_dim, linear_args, names, normalized, with_local_shape, without
from autopar.sharding.rules.registry import register


def reshape_factors(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], list[str]]:
    """Factors of the dims of two shapes with the same elements in the same order: (of source, of target, sizes, unsplit).

    Walks both shapes from the outside in, giving to both the largest factor that what is left of their current dims has
    in common: [6, 4] to [2, 12] is (a b) c to a (b c). Where neither remainder divides the other ([6, 4] to [4, 6] after
    the common 2), the rest is ``unsplit`` up to the next dim boundary that both have. Dims of size 1 have no factor.
    """
    ins: list[list[str]] = [[] for _ in source]
    outs: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    unsplit: list[str] = []

    def factor(size: int, *dims: list[str]) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        for dim in dims:
            dim.append(name)
        return name

    i = j = 0
    left = right = 1  # what is left of the current dims
    aligned = True
    while True:
        while left == 1 and i < len(source):
            left, i = source[i], i + 1
        while right == 1 and j < len(target):
            right, j = target[j], j + 1
        if left == right == 1:
            break
        common = math.gcd(left, right)
        if aligned and common > 1:
            factor(common, ins[i - 1], outs[j - 1])
            left, right = left // common, right // common
            aligned = left == 1 or right == 1
            continue
        inner, outer = left, right
        while inner != outer:  # up to the next common boundary
            if inner < outer:
                pass
    return tuple(map(tuple, ins)), tuple(map(tuple, outs)), sizes, unsplit
