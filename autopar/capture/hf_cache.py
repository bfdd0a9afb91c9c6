"""The cache of keys and values that a transformers model is given while it is traced.

It is a leaf of nobody's: pytree takes it apart, so the keys and values that it holds become inputs of the graph, and
those that the forward leaves in it outputs. transformers asks a cache how long it is and hands it the keys and values
of new tokens; what it answers there decides which masks the model makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autopar._compat import pytree
from autopar.errors import CaptureError
from autopar.ops.cache import cache_write

#: Attribute of keys that come out of a cache in which there was something: they need a mask.
CACHED = "autopar_cached"


class TracedCache:
    """Keys [B, KV, T, D] and values of every layer, of which the tokens before ``filled`` (int64 scalar) are known; an
    empty one (None) holds nothing yet, and after a forward the keys and values of its tokens.

    Written keys and values carry no gradients: a graph with a cache is no graph to train with.
    """

    def __init__(
        self, keys: Sequence[Tensor] = (), values: Sequence[Tensor] = (), filled: Tensor | None = None
    ) -> None:
        self.keys, self.values, self.filled = list(keys), list(values), filled
        self.written = False

    # what transformers asks
    is_compileable = False

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets what is outside of its window: masks hide it."""
        return [False] * max(1, len(self.keys))

    is_linear = is_dummy = is_sliding

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens before those of this forward: a tensor, 0 if there are none."""
        return 0 if self.filled is None else self.filled

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys that are attended, and the place of the first."""
        return (query_length if self.filled is None else self.keys[0].shape[2]), 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values of new tokens in a layer; returns those of all."""
        self.written = True
        if self.filled is None:
            if layer_idx != len(self.keys):
                raise _out_of_order(layer_idx, len(self.keys))
            self.keys.append(key.detach())
            self.values.append(value.detach())
            return key, value
        self.keys[layer_idx] = cache_write(self.keys[layer_idx], key.detach(), self.filled)
        self.values[layer_idx] = cache_write(self.values[layer_idx], value.detach(), self.filled)
        setattr(self.keys[layer_idx], CACHED, True)
        return self.keys[layer_idx], self.values[layer_idx]

    # what pytree asks
    def leaves(self) -> list[Tensor]:
        """Its tensors: ``filled`` only where it comes in, since going out it would be an input that is returned."""
        filled = [] if self.filled is None or self.written else [self.filled]
        return [*self.keys, *self.values, *filled]


def _out_of_order(layer: int, layers: int) -> CaptureError:
    return CaptureError(
        f"layer {layer} keeps keys and values where layer {layers} should",
        expected="every layer to keep its own, one after the other",
        found="layers that share keys and values, or keep none",
        change="generate with the model itself: its cache cannot be split",
    )


def _flatten(cache: TracedCache) -> tuple[list[Tensor], tuple[int, bool]]:
    leaves = cache.leaves()
    return leaves, (len(cache.keys), len(leaves) > 2 * len(cache.keys))


def _flatten_with_keys(cache: TracedCache) -> tuple[list[tuple[Any, Tensor]], tuple[int, bool]]:
    leaves, context = _flatten(cache)
    names = [f"{kind}.{i}" for kind in ("keys", "values") for i in range(context[0])] + ["filled"]
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=False)], context


def _unflatten(leaves: Any, context: tuple[int, bool]) -> TracedCache:
    given, (layers, filled) = list(leaves), context
    return TracedCache(given[:layers], given[layers : 2 * layers], given[-1] if filled else None)


pytree.register_pytree_node(
    TracedCache,
    _flatten,
    _unflatten,
    serialized_type_name="autopar.TracedCache",
    flatten_with_keys_fn=_flatten_with_keys,
)


def kept(tree: Any) -> list[Any]:
    """The leaves of ``tree`` that are keys and values of caches in it, keys first."""
    found = pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, TracedCache))
    return [leaf for cache in found if isinstance(cache, TracedCache) for leaf in (*cache.keys, *cache.values)]
