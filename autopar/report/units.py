"""Numbers as people read them: three significant digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def bytes_text(count: float) -> str:
    """Bytes in binary units: ``bytes_text(80 * 2**30) == "80 GiB"``."""
    return _scaled(count, _BYTES)


def seconds_text(seconds: float) -> str:
    """Seconds: ``seconds_text(0.0123) == "12.3 ms"``."""
    return _scaled(seconds, _SECONDS)


def share_text(share: float) -> str:
    """A fraction as a percentage with two digits: ``share_text(0.1234) == "12%"``."""
    if 0 < share < 1e-4:
        return "<0.01%"
    return f"{_digits(share * 100, 2)}%"


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    """``value`` in the largest of ``units`` in which, rounded, it is at least 1."""
    for unit, size in units:
        if float(f"{value / size:.3g}") >= 1:
            return f"{_digits(value / size, 3)} {unit}"
    return f"{_digits(value / units[-1][1], 3)} {units[-1][0]}" if value else "0"


def _digits(value: float, digits: int) -> str:
    """``digits`` significant digits, more if there are more before the point, without an exponent or trailing zeros."""
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{float(f'{value:.{digits}g}'):.{digits + 2}f}".rstrip("0").rstrip(".")
