"""What a long search is doing, on the terminal of whoever waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

#: Seconds after which a search says what it does.
QUIET_SECONDS = 2.0


class Progress:
    """One line that changes; nothing where standard error is no terminal."""

    def __init__(self, status: Status) -> None:
        self._status, self._began, self._shown = status, time.monotonic(), False

    def say(self, text: str) -> None:
        """Show ``text`` with the seconds so far, once they are more than `QUIET_SECONDS`."""
        took = time.monotonic() - self._began
        if took < QUIET_SECONDS or not self._status.console.is_terminal:
            return
        self._status.update(f"{text} ({took:.0f} s)")
        if not self._shown:
            self._shown = True
            self._status.start()


def announce(text: str) -> None:
    """One line that stays, above the progress of what follows; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(text, markup=False, highlight=False)


@contextmanager
def progress() -> Iterator[Progress]:
    """A `Progress` that leaves nothing behind."""
    status = Status("", console=Console(stderr=True))
    try:
        yield Progress(status)
    finally:
        status.stop()
