"""What names a model on the command line: a directory or config in Hugging Face format, or a function."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from autopar.arguments import ExampleInputs
from autopar.capture.hf import is_transformers_model
from autopar.errors import CommandError
from autopar.hint_checks import nearest_names

#: The argument MODEL.
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory or config.json in Hugging Face format (weights are not needed), or package.module:function, "
        "which returns a module, or a module and its example inputs.",
        show_default=False,
    ),
]


def make_model(name: str, masters: bool, weights: bool = False) -> tuple[nn.Module, ExampleInputs | None]:
    """The model that ``name`` means, and its example inputs where a function gives them.

    A model of a config is on the meta device, or with ``weights`` has those that lie beside it, if any; its parameters
    are in the config's dtype, with ``masters`` in float32. CommandError if there is no such model or it cannot be made.
    """
    path = Path(name)
    if path.exists():
        return _of_transformers(path, torch.float32 if masters else None, weights), None
    if ":" in name:
        return _of_function(name)
    raise CommandError(
        f"There is no model {name}.",
        expected="a directory or config.json in Hugging Face format, or package.module:function",
        found="no file, no directory, and no colon before the name of a function",
        change="check the path (models are not downloaded), or write for instance my_models:tiny",
    )


def _of_transformers(path: Path, dtype: torch.dtype | None, weights: bool) -> nn.Module:
    try:
        from autopar.capture.hf_config import has_weights, model_from_config, model_with_weights
    except ImportError as error:
        raise CommandError(
            f"transformers is needed to make the model of {path}.",
            expected="an environment with transformers",
            found=str(error),
            change="pip install 'autopar[hf]'",
        ) from error
    return (model_with_weights if weights and has_weights(path) else model_from_config)(path, dtype)


def _of_function(name: str) -> tuple[nn.Module, ExampleInputs | None]:
    """What ``package.module:function`` returns."""
    module, _, function = name.partition(":")
    made = _called(f"{function}() of {module} failed.", _function(module, function))
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise CommandError(
            f"{name} returns no model.",
            expected="a torch.nn.Module, or a pair of one and its example inputs",
            found=f"{type(made).__name__}: {made!r}"[:200],
            change="return the model",
        )
    if inputs is None and not is_transformers_model(model):
        raise CommandError(
            f"{name} returns no example inputs.",
            expected="one batch beside a model that is not a text model of transformers",
            found=f"a {type(model).__name__} alone",
            change="return model, inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments",
        )
    return model, inputs


def _function(module: str, function: str) -> Callable[[], Any]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a console script, unlike python -m, does not look
    found = _called(f"The module {module} cannot be imported.", lambda: importlib.import_module(module))
    value = getattr(found, function, None)
    if not callable(value):
        functions = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")]
        raise CommandError(
            f"{module} has no function {function!r}.",
            expected="a function without arguments that returns a model",
            found="nothing of that name" if value is None else f"{type(value).__name__}: {value!r}"[:200],
            change=nearest_names(function, functions),
        )
    made: Callable[[], Any] = value
    return made


def _called(what: str, call: Callable[[], Any]) -> Any:
    """What ``call`` returns; CommandError with the place and the words of whatever it raises."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # of the user's code, which may do anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        theirs = last.filename.endswith(".py") and last.filename != __file__
        place = f" ({last.filename}, line {last.lineno})" if theirs else ""
        raise CommandError(
            what,
            expected="package.module:function, importable from here and callable without arguments",
            found=f"{type(error).__name__}: {error}{place}",
            change="correct the name, or the code that it names; the current directory is importable",
        ) from error
