"""What `autopar.verify` compares: the untouched model in eager mode, and the sharded program on all its ranks.

Both take the same optimizer steps on the same batch, draw the same dropout masks and give a `Run`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar import ops
from autopar._compat import grouped_mm, pytree
from autopar.capture import batch_tensors
from autopar.passes.partition import Program
from autopar.runtime.precision import inputs_as_used, mixed_call
from autopar.runtime.program import Emitted, Specialization, StepProgram
from autopar.runtime.simulate import Traffic, run_ranks
from autopar.runtime.stages import run_pipeline
from autopar.runtime.step import combine, run_step, step_inputs
from autopar.schedule import stage_ranks
from autopar.sharding.layout import MICRO_BATCH, Layout, Mesh

T = TypeVar("T", Specialization, StepProgram)

#: Learning rates of the comparison's optimizer steps.
LEARNING_RATE = {"sgd": 0.1, "sgd_momentum": 0.1, "adamw": 1e-3}
#: Relative size of the random change of every parameter in `redrawn`: a few units in the last place of bfloat16 (2^-8),
#: so that every rounding is drawn anew and the model is still the user's in all that matters.
REDRAW = 0.02


@dataclass(frozen=True)
class Batch:
    """What one comparison runs: a batch, how many steps of which optimizer are taken on it, and which draw of the
    random numbers of `_tangents` and `redrawn` it is."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    steps: int
    optimizer: str
    draw: int = 0


@dataclass(frozen=True)
class Run:
    """What one way of running the model gave: results and gradients of every step; parameters, and the buffers that the
    forward changes, at the end."""

    results: list[list[Tensor]]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _written_out(rows: Tensor, weight: Tensor, *, offs: Tensor, **defaults: None) -> Tensor:
    """torch's grouped product of rows [P, I], sorted by expert, and weights [E, I, O], which it has not in float64."""
    assert not any(value is not None for value in defaults.values()), defaults
    pieces = torch.tensor_split(rows, offs[:-1].cpu().long())
    return torch.cat([x @ w for x, w in zip(pieces, weight, strict=True)])


class _Float64(TorchFunctionMode):
    """Turns every request for float32 into one for float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is grouped_mm and args[0].dtype is torch.float64:
            func = _written_out
        return func(*map(widen, args), **{name: widen(value) for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def exact_float64() -> Iterator[None]:
    """Inside, a float64 model computes in float64 throughout, in eager mode and while it is captured.

    transformers casts to float32 in RMSNorm, rotary embeddings, softmax and the loss, so that a float64 model is only
    exact to float32. Here ``Tensor.float``, ``Tensor.to(torch.float32)`` and every argument ``torch.float32`` mean
    float64, it is the default dtype, and the grouped products of experts are written out.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def redrawn(model: nn.Module, draw: int) -> nn.Module:
    """The model (draw 0), or a copy of it whose parameters differ by some 2 %, the same way every time."""
    if draw == 0:
        return model
    generator, other = torch.Generator().manual_seed(draw), copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            if p.is_floating_point():
                p.mul_(1.0 + REDRAW * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return other


def _tangents(special: Emitted, draw: int) -> list[Tensor]:
    """What flows back into each differentiable output: 1 for a loss, random numbers for anything else."""
    generator = torch.Generator().manual_seed(draw)
    wanted = [o.node.meta["val"] for o in special.captured.outputs if o.tangent is not None]
    return [
        torch.ones((), dtype=t.dtype)
        if not t.dim()
        else torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        for t in wanted
    ]


def _optimizer(parameters: Iterable[Tensor], name: str) -> torch.optim.Optimizer:
    parameters = [*parameters] or [torch.zeros(0)]  # a frozen model has none, which optimizers refuse
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE[name])
    return torch.optim.SGD(parameters, lr=LEARNING_RATE.get(name, 0.1), momentum=0.9 if name == "sgd_momentum" else 0.0)


def _seed(step: int) -> Tensor:
    return torch.tensor([0x5EED, step])


def run_eager(model: nn.Module, special: Emitted, batch: Batch, mixed: bool = True) -> Run:
    """The reference: a copy of the untouched model, in this process, in eager mode; with the casts of mixed precision
    if there are any and ``mixed``."""
    own = copy.deepcopy(model)
    opt = _optimizer([p for p in own.parameters() if p.requires_grad], batch.optimizer)
    outputs = [o for o in special.captured.outputs if o.buffer is None]
    compared = [i for i in special.places if special.captured.outputs[i].buffer is None]
    results, gradients = [], []
    for step in range(batch.steps):
        opt.zero_grad()
        draws = ops.counter_draws(_seed(step)) if special.captured.seed is not None else contextlib.nullcontext()
        with draws:
            if mixed:
                out = mixed_call(own, special.captured, batch.args, batch.kwargs)
            else:
                out = own(*batch.args, **batch.kwargs)
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        wanted = [t for t, o in zip(tensors, outputs, strict=True) if o.tangent is not None]
        if wanted:
            tangents = zip(_tangents(special, batch.draw), wanted, strict=True)
            torch.autograd.backward(wanted, [g.to(t.dtype) for g, t in tangents])
        results.append([tensors[i].detach() for i in compared])
        gradients.append({n: p.grad.detach().clone() for n, p in own.named_parameters() if p.grad is not None})
        opt.step()
    changed = {o.buffer for o in special.captured.outputs}
    buffers = {b.name: b.tensor(own) for b in special.captured.buffers if b.name in changed}
    return Run(results, gradients, {n: p.detach() for n, p in own.named_parameters()}, buffers)


def run_exact(model: nn.Module, special: Emitted, batch: Batch) -> Run:
    """`run_eager` in float64 throughout."""

    def wide(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    args, kwargs = pytree.tree_map_only(Tensor, wide, (batch.args, dict(batch.kwargs)))
    with exact_float64():
        own = copy.deepcopy(model).double()
        return run_eager(own, special, replace(batch, args=args, kwargs=kwargs), mixed=False)


def run_sharded(model: nn.Module, special: Emitted, batch: Batch) -> tuple[Run, Traffic]:
    """The sharded program on all its ranks, and the traffic of its first step."""
    simulation: _Simulation[Any]
    if isinstance(special, StepProgram):
        simulation = _StepSimulation(model, special, batch.optimizer, batch.draw)
    else:
        simulation = ForwardSimulation(model, special, batch.optimizer, batch.draw)
    tensors = batch_tensors(batch.args, batch.kwargs)
    steps = [simulation.step(number, tensors) for number in range(batch.steps)]
    results, gradients = [r for r, _ in steps], [g for _, g in steps]
    return Run(results, gradients, simulation.parameters(), simulation.updated), simulation.traffic


def assemble(pieces: list[Tensor], layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor from every rank's piece; replicas that differ make it NaN."""
    whole = pieces[0].new_empty(shape)
    for rank in range(mesh.size):
        layout.local_slice(mesh, whole, rank).copy_(pieces[rank])
    same = all(
        torch.equal(layout.local_slice(mesh, whole, r), pieces[r]) or pieces[r].isnan().any() for r in range(mesh.size)
    )
    return whole if same else torch.full_like(whole, float("nan"), dtype=torch.float64)


class _Simulation(Generic[T]):
    """The sharded program on all ranks, with optimizer steps on every rank's pieces."""

    def __init__(self, model: nn.Module, special: T, optimizer: str, draw: int) -> None:
        self.special: T = special
        self.mesh, self.draw = special.assignment.mesh.without(MICRO_BATCH), draw
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
        self.updated: dict[str, Tensor] = {}

    def step(self, number: int, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Forward, backward and optimizer step; the whole results and gradients."""
        raise NotImplementedError

    def given(self, number: int, tensors: list[Tensor]) -> dict[str, Tensor]:
        """What enters the program in step ``number`` and is the same on every rank: buffers, the batch, the seed."""
        special, captured = self.special, self.special.captured
        used = zip(captured.inputs, inputs_as_used(captured, tensors), strict=True)
        batch = {special.input_name(n): t for n, t in used}
        seed = {special.input_name(captured.seed): _seed(number)} if captured.seed is not None else {}
        return {**self.buffers, **batch, **seed}

    def own(self, rank: int) -> dict[str, Tensor]:
        """What enters the program on one rank: its pieces of the parameters."""
        parameters = self.special.captured.parameters
        return {self.special.input_name(p.placeholder): self.pieces[rank][p.name].detach() for p in parameters}

    def results(self, outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The whole results from those of every rank; new values of buffers are kept for the next step."""
        captured, results = self.special.captured, []
        held = {b.name: b for b in captured.buffers}
        for i, place in enumerate(self.special.places):
            o, layout = captured.outputs[place], self.special.assignment.sinks[place]
            whole = assemble([out[i] for out in outputs], layout, self.mesh, tuple(o.node.meta["val"].shape))
            if o.buffer is None:
                results.append(whole)
            else:
                self.updated[o.buffer] = self.buffers[self.special.input_name(held[o.buffer].placeholder)] = whole
        return results

    def update(self, local: list[list[Tensor]]) -> dict[str, Tensor]:
        trained = [p for p in self.special.captured.parameters if p.gradient is not None]
        whole = {}
        for i, p in enumerate(trained):
            pieces = [g[i].to(p.storage_dtype) for g in local]
            whole[p.name] = assemble(pieces, self.special.assignment.sources[p.placeholder], self.mesh, p.spec.shape)
            for r in self.ranks:
                self.pieces[r][p.name].grad = pieces[r]
        for optimizer in self.optimizers:
            optimizer.step()
        return whole

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters as they are now."""
        return {
            p.name: assemble(
                [self.pieces[r][p.name].detach() for r in self.ranks],
                self.special.assignment.sources[p.placeholder],
                self.mesh,
                p.spec.shape,
            )
            for p in self.special.captured.parameters
        }


class ForwardSimulation(_Simulation[Specialization]):
    """A forward with its backward."""

    def step(self, number: int, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """As `_Simulation.step`."""
        program, traffic = self.special.program, self.traffic if number == 0 else None
        values = [self.values(number, tensors, rank) for rank in self.ranks]
        outputs = self.forward(program, values, traffic)
        local: list[list[Tensor]] = [[] for _ in self.ranks]
        if program.backward is not None:
            self._add_tangents(values)
            inputs = [[v[n] for n in program.backward_inputs] for v in values]
            local = run_ranks(program.backward, inputs, self.mesh, traffic)
        return self.results(outputs), self.update(local)

    def values(self, number: int, tensors: list[Tensor], rank: int) -> dict[str, Tensor]:
        """All that enters the program on one rank in step ``number``."""
        coordinates = self.special.sharded.coordinates.name
        where = torch.tensor(self.mesh.coordinates(rank))
        return {**self.given(number, tensors), **self.own(rank), coordinates: where}

    def forward(
        self, program: Program, values: list[dict[str, Tensor]], traffic: Traffic | None
    ) -> list[list[Tensor]]:
        """The outputs of a forward on every rank; ``values`` of every rank get what it saves for the backward."""
        if program.copies is not None:
            inputs = [[v[n] for n in program.copies.inputs] for v in values]
            for v, made in zip(values, run_ranks(program.copies.module, inputs, self.mesh, traffic), strict=True):
                v.update(zip(program.copies.outputs, made, strict=True))
        inputs = [[v[n] for n in program.forward_inputs] for v in values]
        outputs = run_ranks(program.forward, inputs, self.mesh, traffic)
        for v, out in zip(values, outputs, strict=True):
            v.update(zip(program.saved, out[program.num_results :], strict=True))
        return outputs

    def _add_tangents(self, values: list[dict[str, Tensor]]) -> None:
        outputs = zip(self.special.captured.outputs, self.special.assignment.sinks, strict=False)
        wanted = [(o, layout) for o, layout in outputs if o.tangent is not None]
        for (output, layout), tangent in zip(wanted, _tangents(self.special, self.draw), strict=True):
            assert output.tangent is not None
            for r in self.ranks:
                values[r][self.special.input_name(output.tangent)] = layout.local_slice(self.mesh, tangent, r).clone()


def _busiest(stages: Sequence[Traffic], ranks: Sequence[int]) -> Traffic:
    """What the rank of the pipeline did that had most FLOPs to do; ``ranks`` has the one of every stage."""
    found: dict[int, Traffic] = {}
    for rank, traffic in zip(ranks, stages, strict=True):
        own = found.setdefault(rank, Traffic())
        own.count += traffic.count
        own.bytes += traffic.bytes
        own.flops += traffic.flops
    return max(found.values(), key=lambda traffic: traffic.flops)


class _StepSimulation(_Simulation[StepProgram]):
    """A whole training step, micro-batch after micro-batch. A value is the list of those of all ranks."""

    def step(self, number: int, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """As `_Simulation.step`."""
        special, traffic = self.special, self.traffic if number == 0 else None
        by_rank = []
        for r in self.ranks:
            where = torch.tensor(self.mesh.coordinates(r))
            shared, each = step_inputs(
                special, {**self.given(number, tensors), special.sharded.coordinates.name: where}
            )
            by_rank.append(({**shared, **self.own(r)}, each))

        def runner(traffic: Traffic | None) -> Callable[[fx.GraphModule, Sequence[Any]], list[list[Tensor]]]:
            def run(module: fx.GraphModule, values: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
                inputs = [[value[r] for value in values] for r in self.ranks]
                outputs = run_ranks(module, inputs, self.mesh, traffic)
                return [list(output) for output in zip(*outputs, strict=True)]

            return run

        def combined(op: str, a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
            return [combine(op, x, y) for x, y in zip(a, b, strict=True)]

        given = {name: [shared[name] for shared, _ in by_rank] for name in by_rank[0][0]}
        batches = [
            {name: [own[i][name] for _, own in by_rank] for name in by_rank[0][1][i]} for i in range(special.count)
        ]
        if special.stages:
            traffics = [Traffic() for _ in special.stages]
            runs = [runner(one if traffic is not None else None) for one in traffics]
            results, gradients = run_pipeline(special, given, batches, runs, combined)
            if traffic is not None:
                self.traffic = _busiest(traffics, stage_ranks(special.schedule, special.pp, len(special.stages)))
        else:
            results, gradients = run_step(special.phases, given, batches, runner(traffic), combined)
        by_rank_results = [[value[r] for value in results] for r in self.ranks]
        return self.results(by_rank_results), self.update([[g[r] for g in gradients] for r in self.ranks])
