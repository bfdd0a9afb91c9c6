"""The scan of Mamba-2 and of the models that have its layers (Bamba, Zamba2, Nemotron-H, ...) as ``autopar::scan``, and
the gated delta rule of Qwen3-Next and its kin as ``autopar::delta_rule``.

Each of transformers' modeling files has its own copy of one function for it, which there is no registry for: it is
replaced by name while a model is traced.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.delta import delta_rule
from autopar.ops.scan import scan

#: The names of the functions in a modeling file.
CHUNK_SCAN, DELTA_RULE = "mamba2_chunk_scan", "torch_chunk_gated_delta_rule"


def chunk_scan(
    original: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """transformers' ``mamba2_chunk_scan``: hidden_states [B, S, H, P], dt [B, S, H], A [H], B and C [B, S, G, N] -> a
    float32 [B, S, H, P]. What the operator does not have, states coming in or going out, is left to the ``original``.
    """
    if initial_states is not None or return_final_states:
        return original(
            hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit,
            return_final_states, **kwargs,
        )  # fmt: skip
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    x, dt, a, b, c = (t.float() for t in (hidden_states, dt, A, B, C))
    y = scan(x, dt, a, b, c, chunk_size)
    return y if D is None else y + D[..., None] * x


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' ``torch_chunk_gated_delta_rule``: query and key [B, S, G, N], value [B, S, H, P], g and beta
    [B, S, H] -> a [B, S, H, P] in the dtype of the query, and no state. What the operator does not have, states coming
    in or going out and packed sequences, is left to the ``original``."""
    if initial_state is not None or output_final_state or cu_seqlens is not None:
        return original(
            query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens, **kwargs,
        )  # fmt: skip
    dtype = query.dtype
    query, key, value, g, beta = (t.float() for t in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    return delta_rule(query * query.shape[-1] ** -0.5, key, value, g, beta, chunk_size).to(dtype), None


_REPLACED: dict[str, Callable[..., Any]] = {CHUNK_SCAN: chunk_scan, DELTA_RULE: gated_delta_rule}


@contextlib.contextmanager
def whole_scans() -> Iterator[None]:
    """For the length of a trace: scans are single operators."""
    files = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.models.")]
    with contextlib.ExitStack() as stack:
        for file, (name, ours) in itertools.product(files, _REPLACED.items()):
            original = vars(file).get(name)
            if original is not None:
                setattr(file, name, partial(ours, original))
                stack.callback(setattr, file, name, original)
        yield
