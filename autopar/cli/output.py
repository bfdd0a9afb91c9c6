"""How results and errors are shown: text for people, or with ``--json`` one JSON document on standard output."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, ParamSpec

import typer

from autopar.errors import AutoparError

P = ParamSpec("P")

#: The option that all commands have.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text, errors too.")]


def show(as_json: bool, text: str, data: Any) -> None:
    """Print a result: ``text``, or ``data`` as JSON."""
    typer.echo(json.dumps(plain(data), indent=1, allow_nan=False) if as_json else text)


def note(text: str) -> None:
    """What is said beside the result, on standard error."""
    typer.echo(text, err=True)


def plain(value: Any) -> Any:
    """Dataclasses and mappings as JSON holds them; numbers that are not finite, which it does not hold, as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """``command``, which ends with code 1 where autopar raises an error, and shows the error without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except AutoparError as error:
            _show_error(error, bool(kwargs.get("as_json")))
            raise typer.Exit(1) from None

    return run


def _show_error(error: AutoparError, as_json: bool) -> None:
    kind = type(error).__name__
    if as_json:
        parts = {name: getattr(error, name) for name in ("what", "expected", "found", "change")}
        typer.echo(json.dumps({"error": {"kind": kind, **parts}}, indent=1))
    else:
        typer.echo(f"{typer.style(kind, fg='red', bold=True)}: {error}", err=True)
