"""A rank that fails in a run of real processes: the others end soon, and every rank says which rank it was and why."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time

import pytest
from test_distributed import SCRIPTS, said, torchrun

pytestmark = pytest.mark.dist
SECONDS = 240  # a hang must not look like slowness


def alone(what: str) -> tuple[list[int], str, float]:
    """Run ``failures.py what`` in two processes that nobody watches; their exit codes, their output and the seconds
    between the first end and the last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WORLD_SIZE": "2",
                   "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / "failures.py"), what]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [ranks[0].communicate(timeout=SECONDS)[0]]
        first = time.monotonic()
        if what.startswith("out_of_memory"):
            ranks[1].kill()  # it sleeps
        outputs.append(ranks[1].communicate(timeout=SECONDS)[0])
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], "".join(outputs), time.monotonic() - first


GONE = r"rank 1 failed in {} \(call \d+\): (no sign of life|it ended)"


@pytest.mark.parametrize(("what", "message"), [
    ("killed_in_forward", GONE.format("forward")),
    pytest.param("killed_in_backward", GONE.format("backward"), marks=pytest.mark.slow),
    pytest.param("killed_in_train_step", GONE.format("train_step"), marks=pytest.mark.slow),
    pytest.param("killed_in_pipeline", GONE.format("train_step"), marks=pytest.mark.slow),
    pytest.param("killed_before_clipping", GONE.format("clip_grad_norm_"), marks=pytest.mark.slow),
    pytest.param("out_of_memory_in_pipeline",
                 r"rank 1 failed in train_step \(call 3\): OutOfMemoryError: CUDA out of memory",
                 marks=pytest.mark.slow),
    pytest.param("out_of_memory", r"rank 1 failed in forward \(call 4\): OutOfMemoryError: CUDA out of memory",
                 marks=pytest.mark.slow),
    pytest.param("data_loader", r"rank 1 failed in its own code: ValueError: the file is cut short",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_the_others_end_with_the_reason(what: str, message: str) -> None:
    """Killed in forward, backward, train_step, with a pipeline too, and between two calls; out of memory on a rank that
    lives on while the other waits for it, in a collective or for a message; an error of the user's own code."""
    codes, output, _ = alone(what)
    lines = [line for line in output.splitlines() if line.startswith("[rank 0] ")]
    assert len(lines) == 1 and re.search(message, lines[0]), output[-4000:]
    assert codes[0] != 0 and codes[1] != 0


@pytest.mark.slow
def test_another_batch_in_a_step_without_comparison() -> None:
    """Steps of training that are as the one before do not compare batches; both ranks say so all the same, and end."""
    codes, output, _ = alone("much_later_batch_shapes")
    for rank in range(2):
        lines = [line for line in output.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert len(lines) == 1 and "ranks [1] passed another batch than rank 0" in lines[0], output[-4000:]
    assert "input_ids int64 [8, 8]" in output and "on rank 1: input_ids int64 [4, 8]" in output
    assert codes == [70, 70]


@pytest.mark.slow
def test_ranks_that_differ_say_so() -> None:
    """Global batches with other contents, local ones that should be the same, other plans, other weights, other code:
    one message on all ranks; a loss of nan is a warning, once on each."""
    result = torchrun(2, SCRIPTS / "failures.py", "differing", timeout=120)
    expected = [
        "batch_contents: ranks [1] passed another batch than rank 0",
        "local_contents: ranks [1] passed another local batch than ranks with the same data_rank",
        "plans: ranks [1] were given another plan than rank 0",
        "weights: ranks [1] made another model than rank 0",
        "code: ranks [1] made another program than rank 0",
    ]
    for rank, lines in said(result).items():
        assert lines[:5] == expected, result.stdout[-4000:]
        assert len(lines) == 7 and lines[5].startswith(f"warned: rank {rank}: the loss is nan"), lines
