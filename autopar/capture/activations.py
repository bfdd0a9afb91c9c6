"""The hint ``activations``: results of modules lie as if the modules' own code said so with `autopar.constrain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from autopar._compat import pytree
from autopar.errors import HintError
from autopar.hint_checks import candidates, matches, nearest_names
from autopar.ops.constrain import constrain

#: Dims by axis, None for whole, by a pattern of module paths.
Activations = Mapping[str, Mapping[str, int | None]]


def constrain_results(model: nn.Module, activations: Activations) -> Callable[[], None]:
    """Have the modules of ``model`` that a pattern matches return their result, or the first tensor of it, in the
    layout of that pattern. What is returned is to be called after a forward: HintError if none of a pattern's modules
    was called. HintError at once for a pattern that matches none."""
    called = dict.fromkeys(activations, False)
    names = [name for name, _ in model.named_modules() if name]
    for pattern, dims in activations.items():
        found = [name for name in names if matches(pattern, name)]
        if not found:
            raise HintError(
                f"The hint activations[{pattern!r}] matches no module.",
                expected="the path of a module, * standing for any part of it",
                found=pattern,
                change=nearest_names(pattern, candidates(pattern, names)),
            )
        for name in found:
            _wrap(model.get_submodule(name), pattern, dims, called)

    def check() -> None:
        for pattern in [pattern for pattern, was in called.items() if not was]:
            raise HintError(
                f"The hint activations[{pattern!r}] matches no module that the forward calls.",
                expected="a module with a result, which is a tensor or has one",
                found=pattern,
                change="name a module inside of it, or the one that it is part of",
            )

    return check


def _wrap(module: nn.Module, pattern: str, dims: Mapping[str, int | None], called: dict[str, bool]) -> None:
    original = module.forward
    placements = {axis: Replicate() if dim is None else Shard(dim) for axis, dim in dims.items()}

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(original(*args, **kwargs))
        first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if first is not None:
            called[pattern] = True
            try:
                leaves[first] = constrain(leaves[first], **placements)
            except HintError as error:
                what = f"The hint activations[{pattern!r}] cannot be kept: {error.what}"
                raise HintError(what, expected=error.expected, found=error.found, change=error.change) from None
        return pytree.tree_unflatten(leaves, spec)

    module.forward = forward
