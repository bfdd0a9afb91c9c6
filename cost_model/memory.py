"""Bytes that the state of a parameter takes: the parameter, its gradient, and what the optimizer keeps.

The semantics are torch.optim's: state tensors are made by ``zeros_like(parameter)``, so they have the parameter's own
dtype (torch/optim/adamw.py, sgd.py; a bf16 model has a bf16 Adam state and no fp32 master copy). The scalar ``step`` of
each parameter, 4 bytes, is left out.
"""

from __future__ import annotations

import re

import sympy

from autopar.cost_model.hardware import nearest
from autopar.errors import WorkloadError

#: What the caching allocator of a GPU holds and cannot use, as a fraction of what comes and goes; what rests is
#: allocated once and leaves no gaps. Assumed, for steps that are all alike: where recomputation, offloading and
#: adapters vary what is asked for it is 15 % on average, at most 33 % (Guo et al., GMLake, arXiv:2401.08156, recalled).
FRAGMENTATION = 0.05

SYMBOLS = sympy.symbols("N w", nonnegative=True)
_N, _w = SYMBOLS

OPTIMIZER_ELEMENTS: dict[str, sympy.Expr] = {
    "adamw": 2 * _N,  # exp_avg, exp_avg_sq
    "sgd": sympy.Integer(0),
    "sgd_momentum": _N,  # momentum_buffer
    "adafactor": 2 * sympy.sqrt(_N),  # row_var, col_var: r + c for a matrix r x c, least (and here taken) for a square
    "muon": _N,  # momentum_buffer
    "none": sympy.Integer(0),
}
"""Elements of optimizer state for a parameter of N elements. torch.optim.Adafactor keeps a whole N for vectors, and
torch.optim.Muon leaves them to another optimizer (torch/optim/_muon.py takes matrices alone); they are too few to
matter. Where embeddings go to AdamW beside Muon, their state is that much more."""

OPTIMIZER_BYTES: dict[str, sympy.Expr] = {
    "adamw_8bit": 2 * _N + 2 * 4 * _N / 256,
}
"""Bytes of optimizer state, whatever the parameter's dtype, of optimizers that quantise it: bitsandbytes' AdamW8bit
keeps both moments in one byte an element and, for each, a float32 ``absmax`` a block of 256 elements
(bitsandbytes/optim/optimizer.py, ``Optimizer2State.init_state``; blocks of 2048 before its version 0.44). Parameters of
less than 4096 elements, which it keeps in float32, are too few to matter."""

_DECLARED = re.compile(r"(\d+(?:\.\d+)?) bytes")


def state_of(optimizer: str) -> sympy.Expr | None:
    """Bytes of optimizer state of a parameter of N elements of w bytes; None for an ``optimizer`` that is not known.
    ``"6 bytes"`` declares that one keeps 6 bytes for every element."""
    if optimizer in OPTIMIZER_ELEMENTS:
        return OPTIMIZER_ELEMENTS[optimizer] * _w
    if (declared := _DECLARED.fullmatch(optimizer)) is not None:
        return sympy.Rational(declared[1]) * _N
    return OPTIMIZER_BYTES.get(optimizer)


def check_optimizer(optimizer: object) -> None:
    """WorkloadError unless ``optimizer`` is known or declared."""
    known = [*OPTIMIZER_ELEMENTS, *OPTIMIZER_BYTES]
    if not isinstance(optimizer, str) or state_of(optimizer) is None:
        raise WorkloadError(
            f"There is no optimizer {optimizer!r} in the memory model.",
            expected=f"one of {', '.join(known)}, or bytes of state for an element of a parameter, such as '6 bytes'",
            found=repr(optimizer),
            change=nearest(str(optimizer), known),
        )


def state_formulas(optimizer: str) -> dict[str, sympy.Expr]:
    """Bytes of ``parameters``, ``gradients`` and ``optimizer`` over N elements of w bytes. Without an optimizer
    nothing is trained, so there are no gradients either. WorkloadError for an optimizer that is not known."""
    check_optimizer(optimizer)
    trained = sympy.Integer(0 if optimizer == "none" else 1)
    return {"parameters": _N * _w, "gradients": trained * _N * _w, "optimizer": state_of(optimizer)}
