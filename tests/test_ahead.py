"""Workers that find out ahead what a search asks: answers are those that it would find itself, whatever becomes of the
workers; and so is the plan, however many there are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from dist import small_models as models

import autopar
from autopar import Hints
from autopar.errors import HintError
from autopar.solver import ahead
from autopar.solver.ahead import Ahead, Crew, can_fork, cores

LATE = Crew(2, began=float("-inf"))  # a search that has taken long enough for workers


def at_once(*upcoming: int) -> Callable[[Mapping[int, object]], Iterable[int]]:
    """What is likely to be asked next."""
    return lambda known: [one for one in upcoming if one not in known]


def nothing() -> list[object]:
    return []


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


def test_workers_answer() -> None:
    """Questions that come are answered by others; each answer once."""
    with Ahead(lambda n: (n * n, os.getpid()), LATE, nothing) as asking:
        found = [asking.ask(n, at_once(*range(n + 1, 6))) for n in range(6)]
        again = asking.ask(3, at_once())
    assert [square for square, _ in found] == [n * n for n in range(6)] and again == found[3]
    assert os.getpid() not in {pid for _, pid in found} and len({pid for _, pid in found}) == 2


def test_one_core_has_no_workers() -> None:
    """Nor has a search that has just begun."""
    for crew in (Crew(1, began=float("-inf")), Crew(4)):
        with Ahead(lambda n: os.getpid(), crew, nothing) as asking:
            assert {asking.ask(n, at_once(n + 1)) for n in range(3)} == {os.getpid()}


def test_what_is_shared_stays_the_same() -> None:
    """An answer refers to the objects that both processes have; the rest of it is a copy."""
    shared, own = object(), [1]
    with Ahead(lambda n: (shared, own, shared), LATE, lambda: [shared]) as asking:
        first, copied, last = asking.ask(0, at_once())
    assert first is shared and last is shared
    assert copied == own and copied is not own


def test_workers_that_die_are_not_needed() -> None:
    """Killed in the middle of a question, which is then answered here."""
    here = os.getpid()

    def answer(n: int) -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * n

    with Ahead(answer, LATE, nothing) as asking:
        assert [asking.ask(n, at_once(n + 1)) for n in range(4)] == [0, 2, 4, 6]


def test_workers_that_wait_for_ever_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a lock that nobody holds any more."""
    monkeypatch.setattr(ahead, "STUCK_SECONDS", 0.2)
    here = os.getpid()

    def answer(n: int) -> int:
        if os.getpid() != here:
            time.sleep(1000)
        return 2 * n

    with Ahead(answer, LATE, nothing) as asking:
        assert [asking.ask(n, at_once(n + 1)) for n in range(3)] == [0, 2, 4]


def test_errors_are_raised_where_they_are_asked_for() -> None:
    """With their class and all that they say; what is only likely to be asked raises nothing."""

    def answer(n: int) -> int:
        if n == 2:
            raise HintError("no", expected="a", found="b", change="c")
        return n

    with Ahead(answer, LATE, nothing) as asking:
        assert asking.ask(1, at_once(2, 3)) == 1 and asking.ask(3, at_once(2)) == 3
        with pytest.raises(HintError, match="no"):
            asking.ask(2, at_once())


def test_an_interrupt_ends_all() -> None:
    """Of whoever asks; workers ignore it."""
    with pytest.raises(KeyboardInterrupt), Ahead(lambda n: time.sleep(0 if n == 0 else 1000), LATE, nothing) as asking:
        asking.ask(0, at_once(1))
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_nobody_works_on_for_one_who_is_gone(tmp_path: Path) -> None:
    """Killed, a search leaves no process behind."""
    script = textwrap.dedent(f"""
        import os, time
        from pathlib import Path
        from autopar.solver.ahead import Ahead, Crew
        def answer(n):
            time.sleep(0.3)
            return os.getpid()
        with Ahead(answer, Crew(2, began=float("-inf")), list) as asking:
            pids = {{asking.ask(n, lambda known: [1, 2, 3]) for n in range(3)}}
            Path({str(tmp_path / "new")!r}).write_text(" ".join(map(str, pids)))
            os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pids")!r})
            time.sleep(1000)
    """)
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        _wait_for(lambda: (tmp_path / "pids").exists())
    finally:
        process.kill()
        process.wait()
    pids = (tmp_path / "pids").read_text().split()
    assert pids
    _wait_for(lambda: not any(_is_alive(pid) for pid in pids))


def _wait_for(true: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def _is_alive(pid: str) -> bool:
    """Whether a process runs; one whose parent has not asked what became of it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_how_many_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process, less where a container may use fewer and where torchrun has started others beside it, or
    as many as are told."""
    monkeypatch.delenv(ahead.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(ahead, "_quota", lambda: 8)
    assert cores() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores() == 3
    monkeypatch.setattr(ahead, "_quota", lambda: 2)
    assert cores() == 1
    monkeypatch.setenv(ahead.VARIABLE, "5")
    assert cores() == 5 and Crew().size == 5
    monkeypatch.setenv(ahead.VARIABLE, "100")
    assert Crew().size == ahead.MOST_WORKERS


def test_where_a_fork_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA running, and in a process that may have no children."""
    monkeypatch.setenv(ahead.VARIABLE, "2")
    assert can_fork() and Crew().size == 2
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_initialized", lambda: True)
        assert not can_fork() and Crew().size == 1
    with monkeypatch.context() as m:
        m.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
        assert not can_fork()


def test_solving_leaves_no_threads() -> None:
    """Which a process that is forked afterwards would wait for. Where there are two cores or fewer there were none."""
    script = textwrap.dedent("""
        from pathlib import Path
        import numpy as np
        from autopar.solver.program import Edge, Program, solve
        def threads():
            return len(list(Path("/proc/self/task").iterdir()))
        edge = Edge(0, 1, np.array([0, 1]), np.array([0, 1]), np.array([[0.0, 1.0], [1.0, 0.0]]))
        before, one = threads(), np.array([1.0, 2.0])
        assert solve(Program([one, one], [one, one], [edge], budget=2.5)).options.tolist() == [0, 0]
        assert threads() == before
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


# ---- plans ----


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every question of a search whether a worker answered it; workers start at once."""
    monkeypatch.setattr(ahead, "ALONE_SECONDS", 0.0)
    found: list[bool] = []
    ask = Ahead.ask

    def asked(self: Ahead[object, object], question: object, following: object) -> object:
        here: list[object] = []
        answer = self._answer
        self._answer = lambda one: here.append(one) or answer(one)  # type: ignore[func-returns-value]
        try:
            return ask(self, question, following)  # type: ignore[arg-type]
        finally:
            self._answer = answer
            found.append(not here)

    monkeypatch.setattr(Ahead, "ask", asked)
    return found


def test_plans_do_not_depend_on_workers(monkeypatch: pytest.MonkeyPatch, answered: list[bool]) -> None:
    """One, two and four of them, to the last digit; so too what is planned again under a limit that binds."""
    model, batch = models.llama(), models.tokens()
    every = []
    for count in (1, 2, 4):
        monkeypatch.setenv(ahead.VARIABLE, str(count))
        answered.clear()
        plan = autopar.plan(model, "cpu:2", example_inputs=batch)
        limit = Hints(memory_limit=int(0.9 * plan.peak_memory))
        every.append([plan.to_dict(), plan.with_hints(limit).to_dict()])
        assert any(answered) == (count > 1)
    assert every[0] == every[1] == every[2]
    assert every[0][0] != every[0][1]
