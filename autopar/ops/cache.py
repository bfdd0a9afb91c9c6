"""``autopar::cache_write``: the keys or values of some tokens put into those of all tokens so far.

In a graph it is a function of what was there, as everything in a graph; whoever runs a step of a generation, and owns
what is given to it, has ``cache_write_`` write in place (`autopar.passes.cached`), so that a step moves the bytes of
its own tokens and not those of all before them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _check(cache: Tensor, new: Tensor, start: Tensor) -> None:
    """ValueError where the arguments contradict the docstring of `cache_write`."""
    fits = new.dim() == cache.dim() == 4 and new.dtype == cache.dtype and new.shape[2] <= cache.shape[2]
    if not fits or any(new.shape[d] != cache.shape[d] for d in (0, 1, 3)) or start.dim() or start.dtype != torch.int64:
        raise ValueError(
            "autopar::cache_write expects [B, H, S, D] for a cache [B, H, T, D] of its dtype and an int64 scalar, "
            f"found {new.dtype} {list(new.shape)} for {cache.dtype} {list(cache.shape)} and {start.dtype} "
            f"{list(start.shape)}"
        )


@torch.library.custom_op(
    "autopar::cache_write", mutates_args=(), schema="(Tensor cache, Tensor new, Tensor start) -> Tensor"
)
def cache_write(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    """``cache`` with ``new`` in the place of the tokens from ``start`` on; not differentiable.

    Args:
        cache: [B, H, T, D], the keys or values of T tokens, those not written yet undefined.
        new: [B, H, S, D], of S tokens.
        start: int64 scalar, at most T - S.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(cache, new, start)
    written = cache.clone()
    _write(written, new, start)
    return written


@cache_write.register_fake
def _(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    _check(cache, new, start)
    return torch.empty_like(cache)


def _write(cache: Tensor, new: Tensor, start: Tensor) -> None:
    """`cache_write` over ``cache`` itself."""
    _check(cache, new, start)
    cache.index_copy_(2, start + torch.arange(new.shape[2], device=cache.device), new)


# Run in every layer of every step, below autograd: what `custom_op` puts around a body would take longer than the body.
_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("cache_write_(Tensor(a!) cache, Tensor new, Tensor start) -> ()")
_library.impl("cache_write_", _write, "CompositeExplicitAutograd")


@torch.library.register_fake("autopar::cache_write_")
def _(cache: Tensor, new: Tensor, start: Tensor) -> None:
    _check(cache, new, start)
