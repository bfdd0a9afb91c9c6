"""The C library's heap."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Have the C library return what was freed: it keeps blocks of up to 32 MiB, and small ones made between them hold
    on to the gaps (255 MiB of weights initialised over 4 ranks: a peak of 166 MiB a rank without this, 96 with it)."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if found is not None:
        found(0)
