"""What a publisher's words mean here, read from ``data/families.toml``, which explains every key."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published.rows import Row

TABLE = Path(__file__).parent.parent / "data" / "families.toml"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The conventions of one ``source_family``, under the keys of the table."""

    fused: bool
    attention: str
    dropout: float
    reduce: str
    recompute: str
    selective: str
    zero: int
    zero_2: str
    sequence_parallel: bool
    gathered_again: bool
    tp_overlap: bool
    cp_overlap: bool
    dp_overlap: bool
    prefetch: str
    p2p: str
    whole_gradients: bool
    owners: bool
    fused_accumulation: bool
    fused_optimizer: bool
    fused_loss: bool
    experts_apart: bool
    global_batch: int | None
    seq_len: int | None
    device: Mapping[str, float]
    attention_level: float
    attention_kernels: Mapping[str, str]
    memory: str

    @property
    def not_counted(self) -> tuple[str, ...]:
        """Kinds of bytes of a plan's peak that the published one leaves out."""
        return {"allocated": ("workspace", "slack"), "reserved": ("workspace",)}.get(self.memory, ())

    @property
    def written_out(self) -> bool:
        """Whether attention holds all its scores."""
        return self.attention == "written out"


#: Keys for people.
_NOTES = ("framework", "source")


@functools.cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def family_of(row: Row) -> Family:
    """The conventions of a row: those of its family, with what its notes, what it overlaps and its ``compile`` say."""
    tables = _tables()
    own = dict(tables.get(row.source_family, {}))
    markers = own.pop("markers", ())
    known = {"global_batch": None, "seq_len": None, **tables["default"], **own}
    found = Family(**{k: v for k, v in known.items() if k not in _NOTES})
    for marker in markers:
        changes = {key: value for key, value in marker.items() if key != "contains"}
        if marker["contains"] in f"{row.notes} {row.async_tp_overlap}":
            found = replace(found, **changes)
    return found if row.compile is None else replace(found, fused=row.compile == "y")
