"""What a parallel module makes of the batches that users pass: their names, whether all ranks have the same, the global
batch that local ones are parts of, and words about what does not divide."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.errors import InputError, RuntimeFailure


@dataclass(frozen=True)
class Fallback:
    """Heavy operators that the plan splits over ``axis`` along ``dim`` of the inputs, which does not divide here.

    ``dim`` is None where no dim of an input is to blame (a smaller model). ``inputs`` are the inputs that have the dim,
    with its size, which would have to be a ``multiple``; ``replicated`` is the share of all FLOPs that every rank of
    the axis now repeats.
    """

    axis: str
    dim: int | None
    inputs: tuple[tuple[str, int], ...]
    multiple: int
    replicated: float

    def __str__(self) -> str:
        where = ", ".join(f"{name} ({size})" for name, size in self.inputs)
        what = "a size of the model" if self.dim is None else f"dim {self.dim} of {where}"
        text = (
            f"{what} is not a multiple of {self.multiple} and cannot be split over {self.axis} as planned: "
            f"{self.replicated:.0%} of the FLOPs run replicated over {self.axis} for this batch; results are the same."
        )
        if self.dim is None:
            return text
        drop = "drop the last batch (drop_last=True in the DataLoader), or " if self.dim == 0 else ""
        return f"{text} To split that work, {drop}pad to a multiple of {self.multiple}."


def _named_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
    return [
        (name + pytree.keystr(path), leaf)
        for name, value in named
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor)
    ]


def input_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for every tensor of a batch, in the order of `Captured.inputs`: its keyword, or "argument 0" and so on."""
    return [name for name, _ in _named_tensors(args, kwargs)]


def warn_of(fallbacks: Iterable[Fallback], told: set[tuple[str, int | None]]) -> None:
    """Warn of each kind of fallback (axis and dim) that repeats work and is not in ``told``, and put it there."""
    for fallback in fallbacks:
        kind = (fallback.axis, fallback.dim)
        if kind not in told and fallback.replicated > 0:
            told.add(kind)
            warnings.warn(str(fallback), UserWarning, stacklevel=2)


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The tensors of a batch by name, dtype and shape."""
    return ", ".join(
        f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in _named_tensors(args, kwargs)
    )


#: How many calls of a module compare the contents of batches, and how many calls later it does so again each time.
CONTENTS_FIRST, CONTENTS_EVERY = 3, 100

#: What ranks do that differ, and what to change.
OTHER_BATCH = (
    "passed another batch",
    "give all ranks the same global batch (one seed for what shuffles; parallelize(..., inputs='local') for a sampler "
    "of each rank's own part), or with inputs='local' local batches of one size (drop_last=True in the DataLoader) and "
    "one sequence length (pad_to in the Workload)",
)
OTHER_PLAN = ("were given another plan", "load one file on every rank, or leave plan out: rank 0 then plans for all")
#: Said once by every rank: the loss is that of the global batch, so all of them see it alike.
NOT_A_NUMBER = (
    "the loss is nan, on every rank alike; the step has run to its end. Lower the learning rate, clip gradients "
    "(model.clip_grad_norm_), or leave out the batch; in float16 use a loss scale"
)
OTHER_MODEL = (
    "made another model",
    "build the same model on every rank: one configuration, and torch.manual_seed with one seed before it is made",
)


def compares_contents(call: int) -> bool:
    """Whether the contents of the batch of this ``call`` of a module, counted from 0, are compared between ranks."""
    return call < CONTENTS_FIRST or call % CONTENTS_EVERY == 0


def contents(tensors: Iterable[Tensor]) -> str:
    """A short digest of the values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def model_digest(model: nn.Module) -> str:
    """A digest of a model's parameters: names, shapes, and some values of each."""
    samples = [p.detach().flatten()[:: max(1, p.numel() // 64)] for p in model.parameters()]
    named = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return f"{hashlib.sha256(repr(named).encode()).hexdigest()[:12]} with values {contents(samples)}"


def check_parts(part: int, digest: str, group: dist.ProcessGroup | None) -> None:
    """RuntimeFailure on every rank unless those with the same ``part`` of the batch have the same ``digest`` of it."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (part, digest), group=group)
    first = {p: rank for rank, (p, _) in reversed(list(enumerate(every)))}
    different = [rank for rank, (p, other) in enumerate(every) if other != every[first[p]][1]]
    if different:
        rank = different[0]
        raise RuntimeFailure(
            f"ranks {different} passed another local batch than ranks with the same data_rank",
            expected=f"the batch of rank {first[every[rank][0]]} on rank {rank}, which works on the same samples",
            found=f"other contents on rank {rank}",
            change="give the sampler num_replicas=model.data_world_size and rank=model.data_rank, and one seed",
        )


def check_alike(what: str, group: dist.ProcessGroup | None, otherwise: tuple[str, str] = OTHER_BATCH) -> None:
    """RuntimeFailure on every rank unless ``what``, a rank's words for its batch and the program for it, is the same on
    all ranks: or they would wait for one another for ever. One all-reduce of two integers; ``group`` takes CPU tensors.
    ``otherwise`` says what ranks did that have other words, and what to change.
    """
    if dist.get_world_size() == 1:
        return
    digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0] == -extremes[1]:
        return
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, what, group=group)
    raise unlike(dict(enumerate(every)), otherwise)


def unlike(words: Mapping[int, str], otherwise: tuple[str, str] = OTHER_BATCH) -> RuntimeFailure:
    """The error of ranks that have other ``words`` for what they do than the first of them."""
    first = next(iter(words))
    different = [rank for rank, other in words.items() if other != words[first]]
    return RuntimeFailure(
        f"ranks {different} {otherwise[0]} than rank {first}",
        expected=f"on every rank, as on rank {first}: {words[first]}",
        found=f"on rank {different[0]}: {words[different[0]]}",
        change=otherwise[1],
    )


def widened(args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The global batch of which ``ranks`` ranks have parts like this one along dim 0, its tensors on the meta device.
    InputError if tensors differ in dim 0."""
    sizes = {name: t.shape[0] for name, t in _named_tensors(args, kwargs) if t.dim() > 0}
    if len(set(sizes.values())) > 1:
        raise InputError(
            "a local batch whose tensors have different numbers of samples",
            expected="with inputs='local' every tensor cut along dim 0, the samples of this rank",
            found=", ".join(f"{name} with {size}" for name, size in sizes.items()),
            change="expand what has no batch dim of its own to one row a sample",
        )

    def widen(t: Tensor) -> Tensor:
        return torch.empty((t.shape[0] * ranks, *t.shape[1:]) if t.dim() > 0 else (), dtype=t.dtype, device="meta")

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, widen, (args, dict(kwargs)))
    return found
