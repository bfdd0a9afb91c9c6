"""Seconds that one operator takes on one device: a roofline with a ramp.

    Max((F + h) / (P e), M / (W s)) + t_launch

F FLOPs at the peak P of the dtype and the efficiency e F/(F + h): it saturates at e, the best published matmul of the
device, and is half of that at F = h = ramp x P e FLOPs (benchmarks/fit_matmul.py fits the ramp to matmul.csv; tiles and
waves come later). M bytes at the nominal memory bandwidth W and the fraction s of it that a stream reaches. An operator
without FLOPs has no first term. The numbers and their sources are in the preset's data file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import sympy
import torch

from autopar.cost_model.hardware import Device

Quantity = float | npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]
Seconds = float | npt.NDArray[np.float64]

SYMBOLS = sympy.symbols("F M P e h W s t_launch", nonnegative=True)
_F, _M, _P, _e, _h, _W, _s, _t_launch = SYMBOLS

MATMUL_EFFICIENCY: sympy.Expr = _e * _F / (_F + _h)
"""Achieved over peak FLOP/s."""

FORMULA: sympy.Expr = (
    sympy.Max(sympy.Piecewise(((_F + _h) / (_P * _e), _F > 0), (0, True)), _M / (_W * _s)) + _t_launch
)
"""Seconds of an operator, over ``SYMBOLS``; F / (P x MATMUL_EFFICIENCY) is written out so that F = 0 has a value."""

_seconds = sympy.lambdify(SYMBOLS, FORMULA, "numpy")


def operator_seconds(flops: Quantity, bytes_moved: Quantity, dtype: torch.dtype, device: Device) -> Seconds:
    """Seconds of an operator that does ``flops`` and reads and writes ``bytes_moved``, computing in ``dtype``.

    Both may be arrays that broadcast together: the answer is then an array, else a float. A dtype without a peak of its
    own runs at the fp32 peak (``Device.peak``).
    """
    peak = device.peak(dtype)
    half = device.matmul_ramp * peak * device.matmul_efficiency
    seconds = _seconds(
        np.asarray(flops, dtype=np.float64), np.asarray(bytes_moved, dtype=np.float64), peak, device.matmul_efficiency,
        half, device.memory_bandwidth, device.stream_efficiency, device.launch_overhead,
    )
    return float(seconds) if np.ndim(seconds) == 0 else seconds
