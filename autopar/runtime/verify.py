"""Proof by comparison: every rank of a plan simulated in this process, against the untouched model in eager mode.

The error of a tensor is ||a - b|| / max(||b||, 1e-3 x RMS x sqrt(numel)), RMS over all tensors of its kind: a gradient
that is zero in truth (BERT's key bias) is noise in eager mode too (DESIGN section 9). It is held against a fixed bound
where the dtype can resolve one, else against eager's own error in that dtype (`_Noise`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.runtime.program import Emitted, StepProgram
from autopar.runtime.reference import Batch, Run, redrawn, run_eager, run_exact, run_sharded
from autopar.runtime.simulate import Traffic
from autopar.sharding.layout import MICRO_BATCH

R = TypeVar("R")

#: Largest error allowed, by the least precise floating dtype in the graph (DESIGN section 9); 16-bit dtypes are
#: judged against a float64 run instead, and so is what float32 cannot resolve to the bound.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
#: How much further from a float64 run a sharded run may be than the run of one process in its own dtype.
NOISE_FACTOR = 1.5
#: After how many draws of the parameters noise is compared with noise: one draw scatters by factors (a ReLU that flips
#: sign), the RMS over 16 by a tenth where a tensor has a few dozen elements, that of a scalar loss by more. A program
#: that errs is off by far more than that, after any number.
DRAWS = (1, 2, 4, 8, 16, 32, 64)
#: An RMS error over n draws that is 1 + HOPELESS / n times what is allowed is no noise, and further draws are spared.
HOPELESS = 100.0
#: Share of the RMS gradient under which an element's AdamW step is noise: it divides a gradient by its own size.
ADAM_FLOOR = 1e-3
#: The error of an element of a gradient, in units in the last place of the RMS gradient, that turns its sign often
#: enough to hide what AdamW makes of it: a ReLU that flips in bf16 changes a gradient by some tenths of the RMS.
GRADIENT_ERROR = 64


@dataclass(frozen=True)
class VerifyReport:
    """How the sharded program compares with eager.

    ``ok`` if every error is within its bound. ``errors`` has the error of every tensor; ``worst`` is the one that is
    largest against its bound, ``max_error`` its error. ``gradients`` are the sharded program's in the last step,
    whole, by parameter name; ``loss`` is the first step's; ``flops_share`` the share of the model's FLOPs that one
    rank did, counted as it ran; ``traffic`` its collectives in one step; ``notes`` what a reader should know.
    """

    ok: bool
    max_error: float
    worst: str
    bound: float
    errors: dict[str, float]
    gradients: dict[str, Tensor]
    loss: float | None
    flops_share: float
    traffic: Traffic
    world_size: int
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        head = (
            f"{'ok' if self.ok else 'DIFFERENT'}: {self.world_size} simulated ranks against eager, largest error "
            f"{self.max_error:.2g} ({self.worst}), allowed {self.bound:.2g}; "
            f"one rank does {self.flops_share:.1%} of the FLOPs"
        )
        return "\n".join([head, *(f"  note: {note}" for note in self.notes)])


def tensor_errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of every tensor (see the module); a shape that differs, or a NaN where the truth has none, is inf."""
    wide = {n: t.double() for n, t in truth.items()}
    count = sum(t.numel() for t in wide.values())
    rms = math.sqrt(sum(float(t.square().sum()) for t in wide.values()) / max(count, 1))
    errors = {}
    for name, b in wide.items():
        a = found[name].double()
        floor = max(float(b.norm()), 1e-3 * rms * math.sqrt(b.numel()), torch.finfo(torch.float64).tiny)
        error = float((a - b).nan_to_num(nan=0.0 if torch.equal(a.isnan(), b.isnan()) else math.inf).norm()) / floor
        errors[name] = error
    return errors


def _errors(found: Run, truth: Run, optimizer: str, dtype: torch.dtype) -> dict[str, float]:
    """Errors of results, gradients, final parameters and buffers, named by kind; ``dtype`` is the least precise one in
    which the runs compute."""
    errors: dict[str, float] = {}
    for step, (a, b) in enumerate(zip(found.results, truth.results, strict=True)):
        errors |= {
            f"result {i} of step {step}": e
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            if y.is_floating_point()
            for e in tensor_errors({"": x}, {"": y}).values()
        }
    for step, (ga, gb) in enumerate(zip(found.gradients, truth.gradients, strict=True)):
        errors |= {f"gradient of {n} in step {step}": e for n, e in tensor_errors(ga, gb).items()}
    floor = max(ADAM_FLOOR, GRADIENT_ERROR * torch.finfo(dtype).eps) if optimizer == "adamw" else 0.0
    kept = {n: _above_floor(n, truth, floor) for n in truth.parameters}
    pa = {n: torch.where(kept[n], found.parameters[n], 0) for n in kept if n in found.parameters}
    pb = {n: torch.where(kept[n], truth.parameters[n], 0) for n in pa}
    after = f"after {len(found.results)} steps"
    errors |= {f"buffer {n} {after}": e for n, e in tensor_errors(found.buffers, truth.buffers).items()}
    return errors | {f"parameter {n} {after}": e for n, e in tensor_errors(pa, pb).items()}


def _above_floor(name: str, truth: Run, floor: float) -> Tensor:
    """Elements whose gradient was above ``floor`` times the RMS of all gradients in every step."""
    kept = torch.ones_like(truth.parameters[name], dtype=torch.bool)
    for gradients in truth.gradients:
        if floor > 0 and name in gradients:
            every = torch.cat([g.flatten().double() for g in gradients.values()])
            kept &= gradients[name].abs() > floor * float(every.square().mean().sqrt())
    return kept


@dataclass(frozen=True)
class Ways(Generic[R]):
    """The ways to run a model that are compared, each of a model and the number of its draw: ``eager``; the same in
    float64 throughout (``exact``); and ``sharded``. ``errors`` are those of one run against another, by name, ``dtype``
    is the least precise one in which they compute."""

    eager: Callable[[nn.Module, int], R]
    exact: Callable[[nn.Module, int], R]
    sharded: Callable[[nn.Module, int], R]
    errors: Callable[[R, R], dict[str, float]]
    dtype: torch.dtype


class _Noise(Generic[R]):
    """Errors of the sharded run and of the one-process run against float64, each an RMS over the draws made so far."""

    def __init__(self, model: nn.Module, ways: Ways[R], sharded: R, eager: R) -> None:
        """``sharded`` and ``eager`` are the runs of the model with its own parameters, the first draw."""
        self.model, self.ways = model, ways
        self.draws = 0
        self.squares: tuple[dict[str, float], ...] = (defaultdict(float), defaultdict(float))
        self._add(sharded, eager, ways.exact(model, 0))

    def _add(self, sharded: R, eager: R, exact: R) -> None:
        for squares, run in zip(self.squares, (sharded, eager), strict=True):
            for name, error in self.ways.errors(run, exact).items():
                squares[name] += error * error
        self.draws += 1

    def draw(self) -> None:
        """One more draw of the parameters."""
        model, ways, draw = redrawn(self.model, self.draws), self.ways, self.draws
        self._add(ways.sharded(model, draw), ways.eager(model, draw), ways.exact(model, draw))

    def errors(self) -> tuple[dict[str, float], dict[str, float]]:
        """The sharded run's errors, and what is allowed."""
        mine, theirs = ({n: math.sqrt(s / self.draws) for n, s in squares.items()} for squares in self.squares)
        # the float64 run is itself only exact to its own bound: a float64 model with one narrow cast inside is that run
        return mine, {n: max(NOISE_FACTOR * e, BOUNDS[torch.float64]) for n, e in theirs.items()}

    def settle(self, names: set[str]) -> tuple[dict[str, float], dict[str, float]]:
        """`errors` after as many draws as decide about ``names``."""
        while True:
            errors, allowed = self.errors()
            worst = max(_ratio(errors[n], allowed[n]) for n in names)
            decided = worst <= 1.0 and self.draws in DRAWS
            if decided or worst > 1.0 + HOPELESS / self.draws or self.draws == DRAWS[-1]:
                return errors, allowed
            self.draw()


@dataclass(frozen=True)
class Judgement:
    """Errors by name with what is ``allowed``, the name of the ``worst`` against that, and over how many ``draws`` of
    the parameters they are."""

    errors: dict[str, float]
    allowed: dict[str, float]
    worst: str
    draws: int

    @property
    def ok(self) -> bool:
        """Whether all errors are allowed."""
        return _ratio(self.errors[self.worst], self.allowed[self.worst]) <= 1.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know."""
        many = f"rounding errors were compared over {self.draws} draws of the parameters"
        return (many,) if self.draws > 1 else ()


def judge(model: nn.Module, ways: Ways[R], sharded: R, eager: R) -> Judgement:
    """Hold the errors of a sharded run against the bound of its dtype, and those that are above it, or have none,
    against eager's own."""
    errors, draws = ways.errors(sharded, eager), 1
    allowed = dict.fromkeys(errors, BOUNDS.get(ways.dtype, 0.0))
    unresolved = {n for n, e in errors.items() if not e <= allowed[n]} if ways.dtype in BOUNDS else set(errors)
    if unresolved and ways.dtype != torch.float64:
        noise = _Noise(model, ways, sharded, eager)
        mine, theirs = noise.settle(unresolved)
        errors |= {n: mine[n] for n in unresolved}
        allowed |= {n: theirs[n] for n in unresolved}
        draws = noise.draws
    ratios = {n: _ratio(e, allowed[n]) for n, e in errors.items()}
    return Judgement(errors, allowed, max(ratios, key=lambda n: ratios[n]), draws)


def compare(
    model: nn.Module,
    special: Emitted,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    steps: int = 1,
    optimizer: str = "sgd",
    notes: tuple[str, ...] = (),
) -> VerifyReport:
    """Run ``special`` on all its ranks and the model in eager mode, ``steps`` optimizer steps each."""

    def batch(draw: int) -> Batch:
        return Batch(args, kwargs, steps, optimizer, draw)

    ways = Ways(
        lambda m, draw: run_eager(m, special, batch(draw)),
        lambda m, draw: run_exact(m, special, batch(draw)),
        lambda m, draw: run_sharded(m, special, batch(draw))[0],
        lambda found, truth: _errors(found, truth, optimizer, least_precise(special)),
        least_precise(special),
    )
    eager = ways.eager(model, 0)
    sharded, traffic = run_sharded(model, special, batch(0))
    judged = judge(model, ways, sharded, eager)
    flops = sum(op.flops for op in special.operators)
    return VerifyReport(
        judged.ok,
        judged.errors[judged.worst],
        judged.worst,
        judged.allowed[judged.worst],
        judged.errors,
        sharded.gradients[-1],
        next((float(r) for r in sharded.results[0] if r.dim() == 0), None),
        traffic.flops / flops if flops else 1.0,
        traffic,
        special.assignment.mesh.without(MICRO_BATCH).size * (special.pp if isinstance(special, StepProgram) else 1),
        notes + judged.notes,
    )


def _ratio(error: float, allowed: float) -> float:
    """An error against what is allowed; NaN and any error where none is allowed are infinite."""
    if math.isnan(error) or math.isnan(allowed):
        return math.inf
    return error / allowed if allowed > 0 else (0.0 if error == 0 else math.inf)


def least_precise(special: Emitted) -> torch.dtype:
    """The least precise floating dtype that the captured graph computes in: a float64 model that casts to float32
    inside is no more exact than float32."""
    found = {s.dtype for s in special.operators.specs.values() if s.dtype.is_floating_point}
    return min(found, key=lambda d: -torch.finfo(d).eps, default=torch.float32)


def real_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with meta tensors replaced by random numbers: token ids for integers."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 2) or 2

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return torch.randint(0, vocabulary, tensor.shape, generator=generator).to(tensor.dtype)

    return pytree.tree_map_only(Tensor, real, (args, dict(kwargs)))
