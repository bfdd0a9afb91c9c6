"""The pages of docs/ are programs: their blocks run as they stand, and what they name is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of
from test_distributed import ROOT

DOCS = ROOT / "docs"
#: Pages whose blocks run.
PAGES = ["extending.md", "hints.md", "inference.md", "trainer.md", "training.md", "tutorial.md", "verify.md"]
#: Pages with blocks of which none can run here, or whose examples another test produces.
OTHERS = ["cli.md", "errors.md", "planning.md"]


def test_every_page_with_code_is_run() -> None:
    """A page with code blocks is run, or is one of those that another test covers."""
    pages = {page.name for page in DOCS.glob("*.md") if blocks_of(page.read_text("utf-8"))}
    assert pages <= {*PAGES, *OTHERS} and set(PAGES) <= pages


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page: str) -> None:
    """Links to files, and to headings of them."""
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", (DOCS / page).read_text("utf-8")):
        path, _, heading = link.partition("#")
        target = (DOCS / path).resolve() if path else DOCS / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE) if heading else []
        anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
        assert not heading or heading in anchors, link


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    """One block after the other, in an empty folder, with this environment's commands."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "110",
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "doc_blocks.py"), str(DOCS / page)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
