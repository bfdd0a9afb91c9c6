"""What modules keep besides tensors: modes, rates, temperatures. A program has them as they were when it was traced."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

#: States of one model after which a program for each more is worth a word.
MANY = 8
_PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype})


def holders(model: nn.Module) -> dict[str, Any]:
    """Every module, and every ``config`` of one, by name."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = module
        config = vars(module).get("config")
        if hasattr(config, "__dict__") and not any(config is other for other in found.values()):
            found[f"{path}.config"] = config
    return found


def _plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or ((kind is list or kind is tuple) and all(type(item) in _PLAIN for item in value))


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """The plain attributes of what holds them, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, holder in found.items()
        for name, value in vars(holder).items()
        if _plain(value)
    }


def carry(source: nn.Module, target: nn.Module) -> None:
    """Give ``target``, a copy of ``source``, the plain attributes that ``source`` has."""
    targets = holders(target)
    for path, holder in holders(source).items():
        theirs = vars(targets[path])
        theirs.update({name: copy.copy(value) for name, value in vars(holder).items() if _plain(value)})


@dataclass
class States:
    """The states that the attributes of ``model`` were in (numbers, flags, texts, lists of them), numbered: what a
    forward may depend on besides tensors and arguments."""

    model: nn.Module
    found: dict[str, Any] = field(init=False)
    known: dict[tuple[str, ...], int] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = holders(self.model)  # to look for them in every call takes as long as a small layer

    def now(self) -> int:
        """The number of the present one. Warns where there are `MANY`: each has programs of its own."""
        # as texts, which tell 1, 1.0 and True apart: they are equal, and graphs of them are not
        values = tuple(repr(v) for holder in self.found.values() for v in vars(holder).values() if _plain(v))
        if values in self.known:
            return self.known[values]
        self.known[values] = len(self.known)
        before, self.names = self.names, _named(self.found)
        if len(self.known) == MANY:
            changed = sorted(name for name, value in self.names.items() if name not in before or before[name] != value)
            warnings.warn(
                f"{', '.join(changed)} of the model has had {MANY} values, and the model is traced for each: if it "
                "changes in every step, keep it in a buffer that is changed in place, or pass it in as a tensor",
                UserWarning,
                stacklevel=2,
            )
        return self.known[values]
