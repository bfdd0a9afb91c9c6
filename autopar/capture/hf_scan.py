"""The scan of Mamba-2 and of the models that have its layers (Bamba, Zamba2, Nemotron-H, ...) as ``autopar::scan``.

Each of transformers' modeling files has its own copy of one function for it, ``mamba2_chunk_scan``, which there is no
registry for: it is replaced by name while a model is traced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.scan import scan

#: The name of the function in a modeling file.
CHUNK_SCAN = "mamba2_chunk_scan"


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


@contextlib.contextmanager
def whole_scans() -> Iterator[None]:
    """For the length of a trace: scans are single operators."""
    files = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and CHUNK_SCAN in vars(module)
    ]
    with contextlib.ExitStack() as stack:
        for file in files:
            original = getattr(file, CHUNK_SCAN)
            setattr(file, CHUNK_SCAN, partial(chunk_scan, original))
            stack.callback(setattr, file, CHUNK_SCAN, original)
        yield
