"""Hints in a YAML file: the fields of `Hints` by name, with errors that name the line.

```yaml
tp: 4
zero: 3
memory_limit: 70GiB
shard:
  model.layers.*.mlp.down_proj.weight: {tp: 1}
```

An error of `Hints` names no line, because it knows of none. It is found by leaving entries out: those without which
there is no such error are the ones that it is about.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import HintError
from autopar.hints import Hints

#: Mappings inside of mappings that hints have: the hint, a pattern, an axis.
_DEPTH = 3


@dataclass(frozen=True)
class _Entry:
    """A value of the file, by the keys that lead to it; ``line`` counts from 1."""

    keys: tuple[Any, ...]
    value: Any
    line: int


def load_hints(path: str | os.PathLike[str], check: Callable[[Hints], None] | None = None) -> Hints:
    """The hints of a YAML file; an empty one has none. HintError, naming file and line, for a file that cannot be read
    or is no YAML, for an unknown or repeated key, for what `Hints` refuses, and for what ``check`` does."""
    entries = _read(Path(path))

    def made(entries: Sequence[_Entry]) -> Hints:
        hints = Hints.from_dict(_table(entries))
        if check is not None:
            check(hints)
        return hints

    try:
        return made(entries)
    except HintError as error:
        lines = sorted({entry.line for entry in _culprits(entries, error, made)})
        raise _at(path, lines, error.what, error.expected, error.found, error.change) from None


def _read(path: Path) -> list[_Entry]:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise HintError(
            f"Cannot read the hints {path}.", expected="a YAML file", found=str(error), change="check the path"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        lines = [] if mark is None else [mark.line + 1]
        found = getattr(error, "problem", None) or " ".join(str(error).split())
        change = "correct the line, or put text with special characters into quotes"
        raise _at(path, lines, "This is not YAML.", _EXPECTED, found, change) from error
    return [] if root is None else list(_entries(path, root, ()))


_EXPECTED = "a mapping from hints to values, for instance tp: 4"


def _entries(path: Path, node: yaml.Node, keys: tuple[Any, ...]) -> Iterator[_Entry]:
    """The values of a mapping, those of mappings inside of it one by one."""
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        found = repr(_value(path, node))[:200]
        raise _at(path, [line], "Hints are a mapping.", _EXPECTED, found, "write one hint a line")
    lines: dict[Any, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _value(path, key_node)
        if not isinstance(key, str):
            raise _at(path, [line], "A key is no text.", _EXPECTED, repr(key), "write a hint's name, or use quotes")
        if key in lines:
            what, found = f"{key!r} is given twice.", f"it is in line {lines[key]} too"
            raise _at(path, [line], what, "every key once", found, "remove one of the two")
        lines[key] = line
        deeper = isinstance(value_node, yaml.MappingNode) and value_node.value and len(keys) + 1 < _DEPTH
        if deeper:
            yield from _entries(path, value_node, (*keys, key))
        else:
            yield _Entry((*keys, key), _value(path, value_node), line)


def _value(path: Path, node: yaml.Node) -> Any:
    """A node as a plain value."""
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError) as error:  # an unknown tag, or a date that there is not
        found = getattr(error, "problem", None) or str(error)
        expected = "a number, text, true, false, or a mapping of them"
        line = node.start_mark.line + 1
        raise _at(path, [line], "A value cannot be read.", expected, found, "put text into quotes") from error


def _table(entries: Sequence[_Entry]) -> dict[Any, Any]:
    """Entries as nested mappings."""
    table: dict[Any, Any] = {}
    for entry in entries:
        inner = table
        for key in entry.keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[entry.keys[-1]] = entry.value
    return table


def _culprits(
    entries: Sequence[_Entry], error: HintError, made: Callable[[Sequence[_Entry]], Hints]
) -> Sequence[_Entry]:
    """The entries without any of which ``error`` is not raised."""
    kept = list(entries)
    for entry in entries:
        fewer = [one for one in kept if one is not entry]
        try:
            made(fewer)
        except HintError as another:
            if another.what == error.what:
                kept = fewer
    return kept


def _at(
    path: str | os.PathLike[str], lines: Sequence[int], what: str, expected: str, found: str, change: str
) -> HintError:
    """A HintError about lines of a file."""
    where = f", line{'s' if len(lines) > 1 else ''} {' and '.join(map(str, lines))}" if lines else ""
    return HintError(f"{path}{where}: {what}", expected=expected, found=found, change=change)
