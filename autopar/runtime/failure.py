"""What happens to all ranks when one of them fails: every one says which and why, and none waits for ever.

Calls into a parallel module are *guarded* and numbered; all ranks make the same calls in the same order. A rank that
fails in one writes the reason into the run's store. The others learn of it in one of three ways:

* their collective breaks (the connection to a process that is gone is closed): the error becomes a RuntimeFailure that
  names the rank and its reason, or the ranks that give no sign of life any more;
* they raise an error of their own in the same call: then nothing else happens, as for a batch that all ranks refuse;
* their main thread hangs in a collective that the failed rank will never join. Nothing can wake it there (Gloo's abort
  does not), so a thread that watches prints the message and ends the process.

Ranks that are given different batches hang as well, where nobody has failed: then every one writes into the store what
it is about, and the same thread compares.

A rank that ends outside of such a call (in its data loader) closes its connections, and the reason is in the store.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn

from autopar._compat import PrefixStore, Store, default_store
from autopar.errors import AutoparError, RuntimeFailure
from autopar.plan import Plan
from autopar.runtime.batches import OTHER_MODEL, OTHER_PLAN, check_alike, model_digest, unlike
from autopar.runtime.parameters import is_meta
from autopar.runtime.process import host_group

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds between two signs of life, and between two looks at the store.
BEAT = 0.5
#: Seconds for which a main thread must not move, in a call that failed elsewhere, to count as hanging.
GRACE = 10.0
#: Seconds without a sign of life after which a rank counts as gone, once a connection has broken.
SILENCE = 5.0
#: Exit code of a process whose main thread hangs because another rank failed.
EXIT_CODE = 70
#: So many calls back a rank tells what it was given: another one can be as many behind.
CALLS_TOLD = 8

#: How the backends' errors read when the other side is gone or late.
_BROKEN = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed ?out|socket|gloo|nccl|remote (process|worker)", re.IGNORECASE
)


@dataclass(frozen=True)
class Failure:
    """``rank`` failed in ``where`` because of ``reason``."""

    rank: int
    where: str
    reason: str

    def error(self) -> RuntimeFailure:
        """What the other ranks raise."""
        return RuntimeFailure(
            f"rank {self.rank} failed in {self.where}: {self.reason}",
            expected="all ranks of a step to the end",
            found=f"rank {self.rank} of {dist.get_world_size()} gave up",
            change=f"see the output of rank {self.rank}, then start the run again from its last checkpoint",
        )


class Watch:
    """This process' part in watching all ranks; ``store`` is read by this object alone."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        store.set_timeout(datetime.timedelta(seconds=30))
        self._store = PrefixStore("autopar/failure", store)
        self._lock = threading.RLock()
        self.rank, self.world = rank, world
        self._calls, self._current = 0, ""
        self._depth, self._ended = 0, False
        self._still: tuple[object, float] = (None, 0.0)
        self._words: deque[tuple[int, str]] = deque(maxlen=CALLS_TOLD)
        self._main = threading.main_thread().ident
        self._hook = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._end)
        threading.Thread(target=self._run, name="autopar-watch", daemon=True).start()

    # -- calls ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Inside, an error of this rank is told to the others, and one that another rank caused names that rank. Calls
        inside of one another are one."""
        if self._depth == 0:
            self._calls += 1
            self._current = f"{what} (call {self._calls})"
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._depth > 1 or isinstance(error, RuntimeFailure):
                raise  # told by the outer call; or agreed on by all ranks
            found = self._caused_by_another(error)
            if found is None:
                self._tell(Failure(self.rank, self._current, _words(error)))
                raise
            self._tell(found)
            raise found.error() from error
        finally:
            self._depth -= 1

    def note(self, words: str) -> None:
        """Remember what this rank is given in the current call, for the case that it hangs."""
        self._words.append((self._calls, words))

    def _caused_by_another(self, error: Exception) -> Failure | None:
        """Which rank is to blame for a broken collective; None if the error is this rank's own."""
        if isinstance(error, AutoparError) or not _is_broken_connection(error):
            return None
        before, deadline = self._beats(), time.monotonic() + SILENCE
        while time.monotonic() < deadline:
            if (found := self._told()) is not None and found.rank != self.rank:
                return found
            time.sleep(BEAT)
        after = self._beats()
        for rank in range(self.world):
            if rank != self.rank and after[rank] in (before[rank], "bye"):
                how = "it ended" if after[rank] == "bye" else "no sign of life (killed, or its host is gone)"
                return Failure(rank, self._current, how)
        return None

    # -- the store ----------------------------------------------------------------------------------------------------

    def _get(self, key: str) -> str | None:
        """A value of the store; None if there is none, or no store any more."""
        try:
            with self._lock:
                return self._store.get(key).decode() if self._store.check([key]) else None
        except (RuntimeError, dist.DistError):
            return None

    def _put(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError, dist.DistError), self._lock:
            self._store.set(key, value)

    def _tell(self, failure: Failure) -> None:
        """The first rank that tells of a call is believed."""
        text = json.dumps([failure.rank, failure.where, failure.reason])
        with contextlib.suppress(RuntimeError, dist.DistError), self._lock:
            self._store.compare_set(f"failed/{self._calls}", "", text)

    def _told(self) -> Failure | None:
        """What another rank has told of the current call, or said when it ended outside of any."""
        text = self._get(f"failed/{self._calls}") or self._get("ended")
        return None if text is None else Failure(*json.loads(text))

    def _beats(self) -> list[str | None]:
        return [self._get(f"beat/{rank}") for rank in range(self.world)]

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        count = 0
        while not self._ended:
            count += 1
            self._put(f"beat/{self.rank}", str(count))
            if self._depth and self._hangs():
                if (found := self._told()) is not None and found.rank != self.rank:
                    self._give_up(found.error())
                if (error := self._unlike()) is not None:
                    self._give_up(error)
            time.sleep(BEAT)

    def _unlike(self) -> RuntimeFailure | None:
        """The error, if ranks that hang were given different things in one call."""
        self._put(f"given/{self.rank}", json.dumps(list(self._words)))
        texts = [self._get(f"given/{rank}") for rank in range(self.world)]
        told = {rank: dict(json.loads(text)) for rank, text in enumerate(texts) if text is not None}
        for call in sorted({call for words in told.values() for call in words}):
            words = {rank: given[call] for rank, given in told.items() if call in given}
            if len(set(words.values())) > 1:
                return unlike(words)
        return None

    def _hangs(self) -> bool:
        """Whether the main thread has not moved for `GRACE` seconds."""
        frame = sys._current_frames().get(self._main or 0)
        place = (self._calls, id(frame), None if frame is None else frame.f_lasti)
        if place != self._still[0]:
            self._still = (place, time.monotonic())
        return time.monotonic() - self._still[1] > GRACE

    def _give_up(self, error: RuntimeFailure) -> None:
        sys.stderr.write(f"[rank {self.rank}] autopar.errors.RuntimeFailure: {error}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        time.sleep(3 * BEAT)  # the store may be this process'; the others have to read it as well
        os._exit(EXIT_CODE)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that ends this process: the others will find their connections closed, and look for the reason."""
        self._hook(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, RuntimeFailure):
            found = self._caused_by_another(error) or Failure(self.rank, "its own code", _words(error))
            if found.rank != self.rank:
                sys.stderr.write(f"[rank {self.rank}] autopar.errors.RuntimeFailure: {found.error()}\n")
            self._put("ended", json.dumps([found.rank, found.where, found.reason]))

    def _end(self) -> None:
        self._ended = True
        self._put(f"beat/{self.rank}", "bye")


def _words(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _is_broken_connection(error: BaseException) -> bool:
    """Whether an error is what a backend raises when another rank is gone, or late."""
    return isinstance(error, dist.DistError) or (
        type(error) in (RuntimeError, ConnectionError, BrokenPipeError) and _BROKEN.search(str(error)) is not None
    )


@functools.cache
def _watch_of(world: dist.ProcessGroup) -> Watch:
    return Watch(default_store().clone(), dist.get_rank(), dist.get_world_size())


def watch() -> Watch | None:
    """The watch of the default process group; None where there is no other rank to watch."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    assert dist.group.WORLD is not None
    return _watch_of(dist.group.WORLD)


def guard(what: str) -> contextlib.AbstractContextManager[None]:
    """`Watch.guard`, if there is anything to watch."""
    found = watch()
    return contextlib.nullcontext() if found is None else found.guard(what)


def guarded(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: every call is guarded."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with guard(what):
                return function(*args, **kwargs)

        return call

    return wrap


def check_ranks(plan: Plan, model: nn.Module) -> None:
    """RuntimeFailure on all ranks unless all have the same plan and, but on the meta device, models of equal values."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    words = hashlib.sha256(plan.report("json").encode()).hexdigest()[:12]
    check_alike(f"{plan} ({words})", host_group(), OTHER_PLAN)
    if not is_meta(model):
        check_alike(f"{type(model).__name__} {model_digest(model)}", host_group(), OTHER_MODEL)
