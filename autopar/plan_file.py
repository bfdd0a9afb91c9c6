"""Plans as JSON: dataclasses to plain values and back, checked by their types; files that are whole or not there."""

from __future__ import annotations

import math
import types
import uuid
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from autopar.errors import PlanError
from autopar.hint_checks import nearest_names


def write(target: Path, text: str, what: str) -> None:
    """Write a file whole or not at all. PlanError, which says ``what`` it is, if it cannot be written."""
    # In the same folder, because only within a file system is a rename atomic.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PlanError(
            f"Cannot write the {what} to {target}.",
            expected="a path in a folder that can be written",
            found=str(error),
            change="create the folder, or give another path",
        ) from error


def encode(value: Any) -> Any:
    """A plan, or a part of it, as plain values that JSON can hold."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(entry) for key, entry in value.items()}
    return [encode(entry) for entry in value] if isinstance(value, tuple | list) else value


def decode(kind: Any, value: Any, where: str) -> Any:
    """``value``, as JSON gives it, as an instance of the type ``kind``; ``where`` names its place in errors. PlanError
    for what is none."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _decode_record(kind, value, where)
    if origin is types.UnionType:  # of one type and None
        return None if value is None else decode(arguments[0], value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise malformed(where, "an object", value)
        return {key: decode(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    if origin is tuple:
        repeated = arguments[-1] is Ellipsis
        if not isinstance(value, list) or (not repeated and len(value) != len(arguments)):
            raise malformed(where, "a list" if repeated else f"a list of {len(arguments)}", value)
        kinds = arguments[:1] * len(value) if repeated else arguments
        return tuple(decode(k, entry, f"{where}[{i}]") for i, (k, entry) in enumerate(zip(kinds, value, strict=True)))
    return _decode_scalar(kind, value, where)


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    right = isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not right or (kind is float and not math.isfinite(value)):
        names = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false"}
        names[types.NoneType] = "null"
        raise malformed(where, names[kind], value)
    return float(value) if kind is float else value


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    """A dataclass from an object that has exactly its fields."""
    if not isinstance(value, Mapping):
        raise malformed(where, "an object", value)
    hints = get_type_hints(kind)
    if missing := [name for name in hints if name not in value]:
        raise PlanError(
            f"{where}: {missing[0]} is missing.",
            expected=f"the keys {', '.join(hints)}",
            found=", ".join(value) or "an empty object",
            change="save the plan again",
        )
    for key in value:
        if key not in hints:
            raise PlanError(
                f"{where}: there is no key {key!r}.",
                expected=f"the keys {', '.join(hints)}",
                found=key,
                change=nearest_names(key, hints),
            )
    return kind(**{name: decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


def malformed(where: str, expected: str, value: object) -> PlanError:
    """The error for an entry of a plan."""
    return PlanError(
        f"{where} is malformed.",
        expected=expected,
        found=repr(value)[:200],
        change="correct the entry, or save the plan again",
    )
