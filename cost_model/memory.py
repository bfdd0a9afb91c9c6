"""Bytes that the state of a parameter takes: the parameter, its gradient, and what the optimizer keeps.

The semantics are torch.optim's: state tensors are made by ``zeros_like(parameter)``, so they have the parameter's own
dtype (torch/optim/adamw.py, sgd.py; a bf16 model has a bf16 Adam state and no fp32 master copy). The scalar ``step`` of
each parameter, 4 bytes, is left out.
"""

from __future__ import annotations

import sympy
import torch

from autopar.cost_model.hardware import nearest
from autopar.errors import WorkloadError

SYMBOLS = sympy.symbols("N w", nonnegative=True)
_N, _w = SYMBOLS

OPTIMIZER_ELEMENTS: dict[str, sympy.Expr] = {
    "adamw": 2 * _N,  # exp_avg, exp_avg_sq
    "sgd": sympy.Integer(0),
    "sgd_momentum": _N,  # momentum_buffer
    "adafactor": 2 * sympy.sqrt(_N),  # row_var, col_var: r + c for a matrix r x c, least (and here taken) for a square
    "none": sympy.Integer(0),
}
"""Elements of optimizer state for a parameter of N elements. torch.optim.Adafactor keeps a whole N for vectors, which
are too few to matter."""


def state_formulas(optimizer: str) -> dict[str, sympy.Expr]:
    """Bytes of ``parameters``, ``gradients`` and ``optimizer`` over N elements of w bytes. Without an optimizer
    nothing is trained, so there are no gradients either. WorkloadError for an optimizer that is not known."""
    if optimizer not in OPTIMIZER_ELEMENTS:
        raise WorkloadError(f"There is no optimizer {optimizer!r} in the memory model.",
                            expected=f"one of {', '.join(OPTIMIZER_ELEMENTS)}", found=optimizer,
                            change=nearest(optimizer, OPTIMIZER_ELEMENTS))
    trained = sympy.Integer(0 if optimizer == "none" else 1)
    return {"parameters": _N * _w, "gradients": trained * _N * _w, "optimizer": OPTIMIZER_ELEMENTS[optimizer] * _w}


def parameter_state_bytes(numel: int, param_dtype: torch.dtype, optimizer: str) -> dict[str, int]:
    """Bytes of ``parameters``, ``gradients`` and ``optimizer`` state of ``numel`` elements of ``param_dtype``, whole
    (on one device if nothing is sharded); the gradient has the parameter's dtype. WorkloadError as
    ``state_formulas``."""
    values = {_N: numel, _w: param_dtype.itemsize}
    return {what: int(sympy.ceiling(formula.subs(values))) for what, formula in state_formulas(optimizer).items()}
