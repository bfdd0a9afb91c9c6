"""What comes back from a sharded forward: tensors that are cut over the ranks and behave as the whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._compat import disable_torch_function, pytree
from autopar.errors import RuntimeFailure

#: Methods that ask about a tensor and not for its numbers.
_ABOUT = {
    Tensor.__hash__,
    Tensor.__len__,
    Tensor.__repr__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.ndimension,
    Tensor.nelement,
    Tensor.numel,
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.size,
    Tensor.stride,
}


class OutputTensor(DTensor):
    """A DTensor that every PyTorch function takes as the whole, plain tensor.

    So a loss outside the model, a metric or an index is computed as in one process, on the same numbers, and may mix
    it with other tensors. The pieces are gathered when a function first needs them, by all ranks together; who wants to
    work on pieces takes ``to_local()``. DTensor's own operators are not used, because not all of them are exact: its
    mean over tokens that count (``ignore_index``) is a mean of the ranks' means.
    """

    @classmethod
    def of(cls, tensor: DTensor) -> OutputTensor:
        """Turn ``tensor`` itself into one."""
        tensor.__class__ = cls
        return tensor  # type: ignore[return-value]

    def whole(self) -> Tensor:
        """The whole tensor, gathered once. Gradients flow back to the pieces."""
        found: Tensor | None = self.__dict__.get("_whole")
        # what was gathered under no_grad is no use for a loss
        if found is None or (torch.is_grad_enabled() and self.requires_grad and not found.requires_grad):
            found = self.__dict__["_whole"] = self.full_tensor()
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT or getattr(func, "__name__", "") == "__get__":
            with disable_torch_function():
                found = func(*args, **kwargs)
            if not isinstance(found, Tensor):
                return found
        args, kwargs = pytree.tree_map_only(OutputTensor, OutputTensor.whole, (args, kwargs))
        return func(*args, **kwargs)


class Deferred:
    """A tensor of the model's result that was not kept, because with labels given only the loss is mostly wanted.

    Using it in any way (an attribute, an operator, a PyTorch function) computes it, by a forward of all ranks together
    with the parameters and dropout masks of the step, and gives an `OutputTensor`. Raises RuntimeFailure if the
    parameters have changed since.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, compute: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self._compute = shape, dtype, compute
        self._value: Tensor | None = None

    def tensor(self) -> Tensor:
        """The tensor itself."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and the like look for their own
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype}: computed when it is used)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Deferred, Deferred.tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Deferred, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*args)

    return apply


for _name in (
    *("__getitem__", "__len__", "__iter__", "__float__", "__int__", "__bool__", "__neg__", "__abs__", "__invert__"),
    *(f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "pow", "matmul")),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__"),
):
    setattr(Deferred, _name, _operator(_name))


def stale(name: str) -> RuntimeFailure:
    """The error for a `Deferred` that is asked for too late."""
    return RuntimeFailure(
        f"{name} of an earlier step cannot be computed any more",
        expected="its first use before the optimizer's step",
        found="parameters that have changed since",
        change="use it before optimizer.step(); from then on it is kept in every step",
    )
