"""Proof by comparison: every rank of a plan simulated in this process, against the untouched model in eager mode.

The error of a tensor is ||a - b|| / max(||b||, 1e-3 x RMS x sqrt(numel)), RMS over all tensors of its kind: a gradient
that is zero in truth (BERT's key bias) is noise in eager mode too (DESIGN section 9).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar import ops
from autopar._compat import pytree
from autopar.capture import batch_tensors
from autopar.runtime.program import Specialization
from autopar.runtime.simulate import Traffic, run_ranks
from autopar.sharding.layout import Layout, Mesh

#: Largest error allowed, by the least precise floating dtype in the graph (DESIGN section 9); 16-bit dtypes are
#: judged against a float64 run instead.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
#: A 16-bit sharded run may be this much further from the float64 original than the 16-bit run of one process.
HALF_FACTOR = 1.5
#: A tensor that float32 itself cannot resolve to the bound (a gradient that is zero in truth, and in practice what is
#: left of terms that cancel) may err by this multiple of eager's own error against float64.
NOISE_FACTOR = 4.0
#: Learning rates of the comparison's optimizer steps.
LEARNING_RATE = {"sgd": 0.1, "sgd_momentum": 0.1, "adamw": 1e-3}
#: Share of the RMS gradient under which an element's AdamW step is noise: it divides a gradient by its own size.
ADAM_FLOOR = 1e-3


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


@dataclass(frozen=True)
class _Run:
    """What one way of running the model gave: results and gradients of every step, parameters at the end."""

    results: list[list[Tensor]]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def _tangents(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """What flows back into each differentiable output: 1 for a loss, fixed random numbers for anything else."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.ones((), dtype=dtype)
        if not shape
        else torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape, dtype in shapes
    ]


def _optimizer(parameters: Iterable[Tensor], name: str) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE[name])
    return torch.optim.SGD(parameters, lr=LEARNING_RATE.get(name, 0.1), momentum=0.9 if name == "sgd_momentum" else 0.0)


def _seed(step: int) -> Tensor:
    return torch.tensor([0x5EED, step])


def run_eager(
    model: nn.Module,
    special: Specialization,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    optimizer: str,
    steps: int,
    dtype: torch.dtype | None = None,
) -> _Run:
    """The reference: a copy of the untouched model, in this process, in eager mode."""
    own = copy.deepcopy(model)
    if dtype is not None:
        own = own.to(dtype)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, dict(kwargs))
        )
    opt = _optimizer([p for p in own.parameters() if p.requires_grad], optimizer)
    outputs = special.captured.outputs
    results, gradients = [], []
    for step in range(steps):
        opt.zero_grad()
        draws = ops.counter_dropout(_seed(step)) if special.captured.seed is not None else contextlib.nullcontext()
        with draws:
            out = own(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        wanted = [t for t, o in zip(tensors, outputs, strict=True) if o.tangent is not None]
        torch.autograd.backward(wanted, _tangents((tuple(t.shape), t.dtype) for t in wanted))
        results.append([t.detach() for t in tensors])
        gradients.append({n: p.grad.detach().clone() for n, p in own.named_parameters() if p.grad is not None})
        opt.step()
    return _Run(results, gradients, {n: p.detach() for n, p in own.named_parameters()})


def _assemble(pieces: list[Tensor], layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor from every rank's piece; replicas that differ make it NaN."""
    whole = pieces[0].new_empty(shape)
    for rank in range(mesh.size):
        layout.local_slice(mesh, whole, rank).copy_(pieces[rank])
    same = all(
        torch.equal(layout.local_slice(mesh, whole, r), pieces[r]) or pieces[r].isnan().any() for r in range(mesh.size)
    )
    return whole if same else torch.full_like(whole, float("nan"))


class _Simulation:
    """The sharded program on all ranks, with optimizer steps on every rank's pieces."""

    def __init__(self, model: nn.Module, special: Specialization, optimizer: str) -> None:
        self.special, self.mesh = special, special.assignment.mesh
        self.ranks = range(self.mesh.size)
        captured, layouts = special.captured, special.assignment.sources
        named = dict(model.named_parameters(remove_duplicate=False))
        self.pieces = [
            {
                p.name: nn.Parameter(layouts[p.placeholder].local_slice(self.mesh, named[p.name].detach(), r).clone())
                for p in captured.parameters
            }
            for r in self.ranks
        ]
        self.buffers = {special.input_name(b.placeholder): b.tensor(model) for b in captured.buffers}
        trained = [p.name for p in captured.parameters if p.gradient is not None]
        self.optimizers = [_optimizer([pieces[n] for n in trained], optimizer) for pieces in self.pieces]
        self.traffic = Traffic()

    def step(self, number: int, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Forward, backward and optimizer step; the whole results and gradients."""
        special, program, captured = self.special, self.special.program, self.special.captured
        common = {**self.buffers, **{special.input_name(n): t for n, t in zip(captured.inputs, tensors, strict=True)}}
        if captured.seed is not None:
            common[special.input_name(captured.seed)] = _seed(number)
        values = [
            {
                **common,
                special.sharded.coordinates.name: torch.tensor(self.mesh.coordinates(r)),
                **{special.input_name(p.placeholder): self.pieces[r][p.name].detach() for p in captured.parameters},
            }
            for r in self.ranks
        ]
        traffic = self.traffic if number == 0 else None
        outputs = run_ranks(
            program.forward, [[v[n] for n in program.forward_inputs] for v in values], self.mesh, traffic
        )
        for v, out in zip(values, outputs, strict=True):
            v.update(zip(program.saved, out[program.num_results :], strict=True))
        self._tangents(values)
        assert program.backward is not None
        local = run_ranks(
            program.backward, [[v[n] for n in program.backward_inputs] for v in values], self.mesh, traffic
        )
        results = [
            _assemble([out[i] for out in outputs], layout, self.mesh, tuple(o.node.meta["val"].shape))
            for i, (o, layout) in enumerate(zip(captured.outputs, special.assignment.sinks, strict=False))
        ]
        return results, self._update(local)

    def _tangents(self, values: list[dict[str, Tensor]]) -> None:
        outputs = [
            (o, layout)
            for o, layout in zip(self.special.captured.outputs, self.special.assignment.sinks, strict=False)
            if o.tangent is not None
        ]
        whole = _tangents((tuple(o.node.meta["val"].shape), o.node.meta["val"].dtype) for o, _ in outputs)
        for (output, layout), tangent in zip(outputs, whole, strict=True):
            assert output.tangent is not None
            for r in self.ranks:
                values[r][self.special.input_name(output.tangent)] = layout.local_slice(self.mesh, tangent, r).clone()

    def _update(self, local: list[list[Tensor]]) -> dict[str, Tensor]:
        trained = [p for p in self.special.captured.parameters if p.gradient is not None]
        whole = {}
        for i, p in enumerate(trained):
            whole[p.name] = _assemble(
                [g[i] for g in local], self.special.assignment.sources[p.placeholder], self.mesh, p.spec.shape
            )
            for r in self.ranks:
                self.pieces[r][p.name].grad = local[r][i]
        for optimizer in self.optimizers:
            optimizer.step()
        return whole

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters as they are now."""
        return {
            p.name: _assemble(
                [self.pieces[r][p.name].detach() for r in self.ranks],
                self.special.assignment.sources[p.placeholder],
                self.mesh,
                p.spec.shape,
            )
            for p in self.special.captured.parameters
        }


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


def _errors(found: _Run, truth: _Run, optimizer: str) -> dict[str, float]:
    """Errors of results, gradients and final parameters, named by kind."""
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
    kept = {
        n: _above_floor(n, truth) if optimizer == "adamw" else torch.ones_like(p, dtype=torch.bool)
        for n, p in truth.parameters.items()
    }
    pa = {n: torch.where(kept[n], found.parameters[n], 0) for n in kept if n in found.parameters}
    pb = {n: torch.where(kept[n], truth.parameters[n], 0) for n in pa}
    return errors | {f"parameter {n} after {len(found.results)} steps": e for n, e in tensor_errors(pa, pb).items()}


def _above_floor(name: str, truth: _Run) -> Tensor:
    """Elements whose gradient was above AdamW's noise floor in every step."""
    kept = torch.ones_like(truth.parameters[name], dtype=torch.bool)
    for gradients in truth.gradients:
        if name in gradients:
            every = torch.cat([g.flatten().double() for g in gradients.values()])
            kept &= gradients[name].abs() > ADAM_FLOOR * float(every.square().mean().sqrt())
    return kept


def compare(
    model: nn.Module,
    special: Specialization,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    steps: int = 1,
    optimizer: str = "sgd",
    notes: tuple[str, ...] = (),
) -> VerifyReport:
    """Run ``special`` on all its ranks and the model in eager mode, ``steps`` optimizer steps each."""
    eager = run_eager(model, special, args, kwargs, optimizer, steps)
    simulation = _Simulation(model, special, optimizer)
    results, gradients = [], []
    for number in range(steps):
        r, g = simulation.step(number, batch_tensors(args, kwargs))
        results.append(r)
        gradients.append(g)
    run = _Run(results, gradients, simulation.parameters())
    dtype = _least_precise(special)
    if dtype in BOUNDS:
        errors = _errors(run, eager, optimizer)
        allowed = dict.fromkeys(errors, BOUNDS[dtype])
        if dtype == torch.float32 and any(not e <= BOUNDS[dtype] for e in errors.values()):
            exact = run_eager(model, special, args, kwargs, optimizer, steps, torch.float64)
            noise = _errors(eager, exact, optimizer)
            allowed = {n: max(BOUNDS[dtype], NOISE_FACTOR * noise[n]) for n in errors}
    else:
        exact = run_eager(model, special, args, kwargs, optimizer, steps, torch.float64)
        errors = _errors(run, exact, optimizer)
        allowed = _half_allowed(_errors(eager, exact, optimizer))
    ratios = {n: _ratio(e, allowed[n]) for n, e in errors.items()}
    worst = max(ratios, key=lambda n: ratios[n])
    flops = sum(op.flops for op in special.operators)
    loss = next((float(r) for r in results[0] if r.dim() == 0), None)
    return VerifyReport(
        all(r <= 1.0 for r in ratios.values()),
        errors[worst],
        worst,
        allowed[worst],
        errors,
        gradients[-1],
        loss,
        simulation.traffic.flops / flops if flops else 1.0,
        simulation.traffic,
        special.assignment.mesh.size,
        notes,
    )


def _half_allowed(theirs: Mapping[str, float]) -> dict[str, float]:
    """16-bit: how far from float64 each tensor may be, given how far the one-process 16-bit run is. A tensor on which
    that run happens to be lucky is granted the median error of its kind."""
    kinds: dict[str, list[float]] = {}
    for name, e in theirs.items():
        kinds.setdefault(name.split()[0], []).append(e)
    median = {kind: sorted(es)[len(es) // 2] for kind, es in kinds.items()}
    return {n: HALF_FACTOR * max(e, median[n.split()[0]]) for n, e in theirs.items()}


def _ratio(error: float, allowed: float) -> float:
    """An error against what is allowed; NaN and any error where none is allowed are infinite."""
    if math.isnan(error) or math.isnan(allowed):
        return math.inf
    return error / allowed if allowed > 0 else (0.0 if error == 0 else math.inf)


def _least_precise(special: Specialization) -> torch.dtype:
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
