"""Other processes that find out ahead what a search is going to ask.

A search asks one question after the other, and which comes next depends on the answers. So it stays as it is, and says
besides what it will ask if nothing surprises it; that is found out meanwhile by workers, processes forked from this
one. An answer follows from its question alone. Hence nothing depends on who found it, when, or how many workers there
are: they save time, and a search whose workers are gone goes on without them.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

Question = TypeVar("Question")
Answer = TypeVar("Answer")

#: Workers of a search at most: it seldom knows more of its next questions, and a wrong guess is work for nothing.
MOST_WORKERS = 8

#: Seconds of the processor that a search takes by itself before there are workers, which cost about a tenth of that.
ALONE_SECONDS = 1.0

#: Seconds after which a worker that has not run at all in between is given up: a lock that another thread held when the
#: process was forked is never released in the worker.
STUCK_SECONDS = 20.0

#: Says how many workers a search may have, instead of the number of cores; 1 is none.
VARIABLE = "AUTOPAR_WORKERS"


def cores() -> int:
    """How many cores a search may use: those that this process may run on and a container's quota pays for, its share
    of them where torchrun started several processes on the host, or what the environment variable `VARIABLE` says."""
    if (told := os.environ.get(VARIABLE, "")).isdigit():
        return max(1, int(told))
    if not hasattr(os, "sched_getaffinity"):
        return 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(len(os.sched_getaffinity(0)), _quota()) // max(1, int(beside) if beside.isdigit() else 1))


def _quota() -> int:
    """Cores that the control group of a container has time for (cgroup-v2.rst of the Linux kernel, cpu.max)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return MOST_WORKERS


def can_fork() -> bool:
    """Whether a fork of this process can work: not of one that has CUDA running, which does not survive it, nor of one
    that may have no children itself, nor where threads of system libraries do not survive it (macOS)."""
    return sys.platform == "linux" and not torch.cuda.is_initialized() and not multiprocessing.current_process().daemon


@dataclass(frozen=True)
class Crew:
    """How many processes may work on a search that ``began`` at so many seconds of the processor."""

    size: int = field(default_factory=lambda: min(cores(), MOST_WORKERS) if can_fork() else 1)
    began: float = field(default_factory=time.process_time)

    @property
    def is_worth_it(self) -> bool:
        """Whether the search has taken so long that workers pay."""
        return self.size > 1 and time.process_time() - self.began > ALONE_SECONDS


@dataclass
class _Worker(Generic[Question]):
    """A process, what it was asked, and the seconds of the processor it had taken when it was last looked at."""

    process: ForkProcess
    connection: Connection
    asked: Question | None = None
    seconds: float = 0.0


class Ahead(Generic[Question, Answer]):
    """Asks ``answer``, a pure function, and has workers of a ``crew`` ask it ahead. They are forked when they are first
    of use, and know what this process knows then; objects that are ``shared`` (of what is there then) stay the same in
    answers that come back, everything else comes as a copy. A context, which ends the workers."""

    def __init__(
        self, answer: Callable[[Question], Answer], crew: Crew, shared: Callable[[], Iterable[object]]
    ) -> None:
        self._answer, self._crew, self._of_both = answer, crew, shared
        self._shared: list[object] = []
        self._workers: list[_Worker[Question]] | None = None
        self._known: dict[Question, Answer] = {}
        self._failed: set[Question] = set()

    def __enter__(self) -> Ahead[Question, Answer]:
        return self

    def __exit__(self, *raised: object) -> None:
        for worker in [*(self._workers or [])]:
            self._end(worker)

    def ask(self, question: Question, following: Callable[[Mapping[Question, Answer]], Iterable[Question]]) -> Answer:
        """The answer. ``following`` says what is likely to be asked next, in order, with what is known so far. Where
        the answer raises an error, it is raised here, and never for what is only likely to be asked."""
        if self._workers is None and self._crew.is_worth_it:
            self._start()
        while question not in self._known and question not in self._failed and self._workers:
            self._hand_out(question, following)
            if all(w.asked != question for w in self._workers):
                break  # all are busy with other questions, or gone
            self._receive()
        if question not in self._known:
            self._known[question] = self._answer(question)
        return self._known[question]

    def _start(self) -> None:
        self._shared = [*self._of_both()]
        names, self._workers = {id(o): i for i, o in enumerate(self._shared)}, []
        context = multiprocessing.get_context("fork")
        for _ in range(self._crew.size):
            mine, other = context.Pipe()
            ends = [mine, *(w.connection for w in self._workers)]
            process = context.Process(target=_serve, args=(other, ends, self._answer, names), daemon=True)
            try:
                with warnings.catch_warnings():  # Python 3.12 warns of threads, for which there is STUCK_SECONDS
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            except OSError:  # no more processes, or no memory
                break
            finally:
                other.close()
            self._workers.append(_Worker(process, mine))

    def _hand_out(
        self, question: Question, following: Callable[[Mapping[Question, Answer]], Iterable[Question]]
    ) -> None:
        """Give every idle worker a question."""
        assert self._workers is not None
        idle = [w for w in self._workers if w.asked is None]
        if not idle:
            return
        taken = {w.asked for w in self._workers} | self._failed
        for one in dict.fromkeys([question, *following(self._known)]):
            if one in taken or one in self._known:
                continue
            worker = idle.pop()
            try:
                worker.connection.send(one)
                worker.asked = one
            except OSError:
                self._end(worker)
            if not idle:
                return

    def _receive(self) -> None:
        """Take the answers that are there, or wait for one."""
        busy = {w.connection: w for w in self._workers or [] if w.asked is not None}
        ready = wait([*busy], STUCK_SECONDS)
        for connection in ready:
            worker = busy[connection]  # type: ignore[index]
            assert worker.asked is not None
            try:
                found = worker.connection.recv_bytes()
            except (EOFError, OSError):
                self._end(worker)
                continue
            if found:
                self._known[worker.asked] = _loads(found, self._shared)
            else:
                self._failed.add(worker.asked)
            worker.asked = None
        if not ready:
            self._give_up([*busy.values()])

    def _give_up(self, busy: Sequence[_Worker[Question]]) -> None:
        """End the workers that have not run since they were last looked at."""
        for worker in busy:
            seconds = _processor_seconds(worker.process.pid)
            if seconds == worker.seconds:
                self._end(worker)
            worker.seconds = seconds

    def _end(self, worker: _Worker[Question]) -> None:
        assert self._workers is not None
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()


def _processor_seconds(pid: int | None) -> float:
    """Seconds of the processor that a process has taken (proc_pid_stat(5)); 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serve(
    connection: Connection, ends: Iterable[Connection], answer: Callable[[Any], object], names: Mapping[int, int]
) -> None:
    """Answer questions until there are no more, or nobody has the other end any more: ``ends`` are those that were
    forked with this process. An interrupt is for the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in ends:
        end.close()
    torch.set_num_threads(1)  # the threads of its pool are not there
    while True:
        try:
            question = connection.recv()
        except EOFError:  # whoever asked is gone
            return
        try:
            found = _dumps(answer(question), names)
        except Exception:  # if it is asked in earnest, it is raised where somebody sees it
            found = b""
        with contextlib.suppress(OSError):
            connection.send_bytes(found)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[int, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._names = names

    def persistent_id(self, obj: object) -> int | None:
        return self._names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> object:
        return self._shared[pid]


def _dumps(found: object, names: Mapping[int, int]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, names).dump(found)
    return file.getvalue()


def _loads(found: bytes, shared: Sequence[object]) -> Any:
    return _Unpickler(io.BytesIO(found), shared).load()
