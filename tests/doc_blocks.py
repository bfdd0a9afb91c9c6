"""Runs the code blocks of a page of documentation in the present folder, in order: ``python doc_blocks.py page.md``.

* a ``python`` block runs in one namespace that all blocks of the page share, as one types them one after the other;
* one whose first line is ``# name.py`` is written to that file;
* a ``sh`` block is a bash script that stops at the first command that fails;
* a block after ``<!-- not run: why -->`` is left out, and so is one of any other language or of none (outputs).
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^(?P<skip><!-- not run: .+ -->\n)?```(?P<language>python|sh)\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, code, first line in the page, and whether a comment says not to run it."""

    language: str
    code: str
    line: int
    skipped: bool

    @property
    def file(self) -> str | None:
        """The name of the file that it is, if it is one."""
        named = re.match(r"# (\S+\.py)\n", self.code)
        return named[1] if named and self.language == "python" else None


def blocks_of(text: str) -> list[Block]:
    """All ``python`` and ``sh`` blocks of a page."""
    return [
        Block(found["language"], found["code"], text[: found.start("code")].count("\n") + 1, bool(found["skip"]))
        for found in BLOCK.finditer(text)
    ]


def run(page: Path) -> None:
    """Run them; the first that fails ends it, as a traceback with the page's name and line, or with its exit code."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page.read_text("utf-8")):
        print(f"--- {page.name}, line {block.line}", flush=True)
        if block.skipped:
            continue
        if block.file is not None:
            Path(block.file).write_text(block.code, "utf-8")
        elif block.language == "sh":
            subprocess.run(["bash", "-e", "-o", "pipefail", "-c", block.code], check=True)
        else:
            exec(compile("\n" * (block.line - 1) + block.code, page.name, "exec"), namespace)


if __name__ == "__main__":
    sys.path[0] = ""  # modules are found in the present folder, as by somebody who types
    run(Path(sys.argv[1]))
