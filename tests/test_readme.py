"""The README's program runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_distributed import ROOT, prepare_smollm2, torchrun


@pytest.mark.dist
@pytest.mark.slow
def test_training_example(tmp_path: Path) -> None:
    """The file ``train.py`` of the README, copied out and run under torchrun: the same falling losses on every rank."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (example,) = [code for code in blocks if code.startswith("# train.py")]
    prepare_smollm2()
    (tmp_path / "train.py").write_text(example, encoding="utf-8")
    result = torchrun(2, tmp_path / "train.py", timeout=900)
    assert result.returncode == 0, result.stdout[-4000:]
    lines = sorted(re.findall(r"^(\d) (\d+\.\d+)$", result.stdout, re.MULTILINE))
    losses = [float(loss) for _, loss in lines]
    assert [int(step) for step, _ in lines] == [0, 0, 1, 1, 2, 2], result.stdout[-2000:]
    assert losses[0] == losses[1] > losses[2] == losses[3] > losses[4] == losses[5]
