"""Rows of a file of published runs, with typed cells. An empty cell is None: the source does not say."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from autopar.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run. The fields are the columns that are used, under their names; times in seconds, memory in
    GiB. ``tokens_per_s_per_gpu`` says the same as ``step_time_s`` where a source prints only one of them."""

    run_id: str
    source_family: str
    model_name: str
    family: str
    n_layers: int
    hidden: int
    ffn_hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int | None
    vocab: int
    n_experts: int | None
    top_k: int | None
    moe_ffn_hidden: int | None
    n_shared_experts: int | None
    tied_embeddings: str | None
    hardware: str
    gpus_per_node: int
    n_gpus: int
    interconnect_inter: str | None
    precision: str
    seq_len: int | None
    micro_batch: int | None
    global_batch: int | None
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    etp: int | None
    sequence_parallel: str | None
    zero_stage: int | None
    zero_group_size: int | None
    recompute: str | None
    compile: str | None
    schedule: str | None
    async_tp_overlap: str | None
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    peak_mem_gib: float | None
    mfu: float | None
    hfu: float | None
    notes: str | None
    status: str
    rank_group: str | None
    rank_kind: str | None

    @property
    def published_seconds(self) -> float | None:
        """Seconds of a step, from tokens/s where no time is printed."""
        if self.step_time_s is not None:
            return self.step_time_s
        if not self.tokens_per_s_per_gpu or not self.global_batch or not self.seq_len:
            return None
        return self.global_batch * self.seq_len / (self.tokens_per_s_per_gpu * self.n_gpus)

    @property
    def is_moe(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.family == "moe"

    @property
    def is_16bit(self) -> bool:
        """Whether matrix products are in a 16-bit type."""
        return self.precision in ("bf16", "fp16", "16bit")


#: The columns that are read, with their types.
COLUMNS = {f.name: get_type_hints(Row)[f.name] for f in fields(Row)}


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a CSV file. InputError, naming row and column, for a missing column or a cell that cannot be read."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            table = list(reader)
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"Cannot read the runs {path}.",
            expected="a CSV file with a header",
            found=str(error),
            change="check the path",
        ) from error
    if missing := [name for name in COLUMNS if name not in names]:
        raise InputError(
            f"{path} lacks columns of published runs.",
            expected=f"the columns {', '.join(COLUMNS)}",
            found=f"no {', '.join(missing)}",
            change="add them; an empty cell stands for what a source does not say",
        )
    return [_row(cells, f"{path}, line {i}") for i, cells in enumerate(table, 2)]


def _row(cells: dict[str, str], where: str) -> Row:
    return Row(**{name: _cell(cells[name], kind, f"{where}: {name}") for name, kind in COLUMNS.items()})


def _cell(text: str | None, kind: Any, where: str) -> Any:
    """A cell as its column's type; a line that is too short has no cell at all."""
    optional = kind not in (str, int, float)
    if not text or not text.strip():
        if optional:
            return None
        raise _bad(where, "a value", text)
    if kind in (str, str | None):
        return text.strip()
    try:
        number = float(text)
    except ValueError:
        raise _bad(where, "a number", text) from None
    whole = kind in (int, int | None)
    if number < 0 or number != number or number == float("inf") or (whole and number != int(number)):
        raise _bad(where, "a whole number" if whole else "a finite number from 0", text)
    return int(number) if whole else number


def _bad(where: str, expected: str, found: str | None) -> InputError:
    return InputError(
        f"{where} is malformed.", expected=expected, found=repr(found), change="correct the cell, or leave it empty"
    )
