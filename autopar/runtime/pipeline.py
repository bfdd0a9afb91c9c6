"""The pipeline of a parallel module: which parameters a rank holds, and how its stages run a step or an evaluation."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopar._compat import start_p2p
from autopar.errors import RuntimeFailure
from autopar.passes.phases import Phases
from autopar.passes.phases import cut as cut_phases
from autopar.passes.pipeline import Stage
from autopar.passes.pipeline import cut as cut_stages
from autopar.plan import Plan
from autopar.runtime.parameters import parameter_names
from autopar.runtime.process import make_device_mesh, stage_mesh
from autopar.runtime.program import Emitted, Specialization, StepProgram
from autopar.runtime.release import run_and_release
from autopar.runtime.shapes import shapes_of
from autopar.runtime.stages import StageRun
from autopar.runtime.step import combine
from autopar.runtime.transport import Channel, scheduled
from autopar.schedule import last_backward, order, stage_ranks, torch_order
from autopar.sharding.layout import Mesh, TensorSpec
from autopar.sharding.stages import homes


def shown(tree: nn.Module, held: Iterable[str]) -> nn.Module:
    """A copy of a module tree, of the same parameters and buffers, without those that are not ``held``."""
    kept = set(held)
    named = dict(tree.named_parameters())
    lost = {id(p) for name, p in named.items() if name not in kept}
    memo: dict[int, Any] = {id(t): t for t in (*named.values(), *tree.buffers())}
    found = copy.deepcopy(tree, memo)
    for module in found.modules():
        for name, p in list(module._parameters.items()):
            if id(p) in lost:
                del module._parameters[name]
    return found


@dataclass(frozen=True)
class _Share:
    """A gradient on this rank: whether its parameter is ``held`` here, the ``group`` of ranks over which its parts are
    summed up (None: nobody else has a part, or this rank has nothing to do with it), and the spec of a part."""

    gradient: str
    held: bool
    group: dist.ProcessGroup | None
    spec: TensorSpec


@dataclass(frozen=True)
class _Loaded:
    """A program made ready for this rank: all stages, the channels of its own, the names of its results, and for a step
    what runs the schedule, where gradients are, and the micro-batch with whose gradients results go back."""

    stages: tuple[Stage, ...]
    channels: dict[int, Channel]
    results: tuple[str, ...]
    run: Callable[[], None] | None
    shares: Sequence[_Share]
    last: int | None = None

    def release(self) -> None:
        """Let go of the values of the last run."""
        for channel in self.channels.values():
            del channel.run


def make_pipeline(plan: Plan) -> Pipeline | None:
    """The pipeline of a plan; None if it has none. PlanError if the plan is for another number of ranks."""
    return None if plan.schedule is None else Pipeline(plan)


def no_forward() -> RuntimeFailure:
    """The error for a forward in training."""
    return RuntimeFailure(
        "a model in a pipeline is trained by train_step",
        expected="loss = model.train_step(**batch), which runs forward and backward of all micro-batches",
        found="model(**batch) in training mode with gradients",
        change="call train_step, then optimizer.step(); to evaluate, model.eval() or torch.no_grad()",
    )


class Pipeline:
    """This rank's place in the pipeline of ``plan``; ``stage_mesh`` is the device mesh of its stages.

    Copies of a module share it: it holds process groups, and no tensors between steps.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.schedule is not None
        mesh = make_device_mesh(Mesh((("pp", plan.degrees["pp"]), *plan.mesh.axes)))
        self.plan, self.group, self.stage_mesh = plan, mesh.get_group("pp"), stage_mesh(mesh, plan.mesh)
        self.ranks = stage_ranks(plan.schedule, plan.degrees["pp"], len(plan.stages))
        self.rank = dist.get_rank(self.group)
        self.own = [s for s, rank in enumerate(self.ranks) if rank == self.rank]
        self.device = torch.device(mesh.device_type)
        #: Groups of ranks that share a parameter, by their places on the pp axis.
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(plan.degrees["pp"])): self.group}
        self._loaded: weakref.WeakKeyDictionary[Emitted, _Loaded] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        return self

    def held(self, model: nn.Module) -> list[str]:
        """The parameters of ``model`` that this rank's stages have, by first name."""
        names = parameter_names(model).items()
        return [first for first, every in names if homes(every, self.plan.stages).intersection(self.own)]

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load(
        self,
        program: Emitted,
        stages: tuple[Stage, ...],
        phases: Phases,
        given: Mapping[str, Tensor],
        bind: Callable[[fx.GraphModule], None],
    ) -> _Loaded:
        """Make a program ready: find the specs of what travels when ``phases`` run, and ``bind`` what this rank runs.
        ``given`` are the inputs of a micro-batch, by name."""
        mesh, specs = program.assignment.mesh, {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in given.items()}
        for p in program.captured.parameters:
            shape = program.assignment.sources[p.placeholder].local_shape(mesh, p.spec.shape)
            specs[program.input_name(p.placeholder)] = TensorSpec(shape, p.storage_dtype)
        travels = [n for stage in stages for n in (*stage.receives, *stage.receives_back, *stage.receives_last)]
        known = {name: specs[name] for name in travels if name in specs}
        found = shapes_of(phases.all(), specs, [name for name in travels if name not in known])
        for s in self.own:
            for phase in stages[s].phases:
                bind(phase.module)
        channels = {s: Channel(s, stages[s], known | found, self.ranks, self.device, self.group) for s in self.own}
        run, shares, last = None, list[_Share](), None
        if isinstance(program, StepProgram):
            shares = self._shares(program)
            schedule = program.schedule, program.pp, len(stages), program.count
            run = scheduled(list(channels.values()), torch_order(*schedule), program.count)
            last = last_backward(order(*schedule), len(stages) - 1)
        loaded = self._loaded[program] = _Loaded(stages, channels, phases.results, run, shares, last)
        return loaded

    # -- parameters of several stages ---------------------------------------------------------------------------------

    def _shares(self, program: StepProgram) -> list[_Share]:
        """Where every parameter with a gradient is. Every rank must call it for every program."""
        found = []
        trained = [p for p in program.captured.parameters if p.gradient is not None]
        made = [frozenset(stage.gradients) for stage in program.stages]
        for p, name in zip(trained, program.phases.gradients, strict=True):
            holders = {self.ranks[s] for s in homes((p.name, *p.aliases), self.plan.stages)}
            places = tuple(sorted(holders | {self.ranks[s] for s, names in enumerate(made) if name in names}))
            group = self._group_of(places) if len(places) > 1 else None
            shape = program.assignment.sources[p.placeholder].local_shape(program.assignment.mesh, p.spec.shape)
            assert p.gradient is not None
            spec = TensorSpec(shape, p.gradient.meta["val"].dtype)
            found.append(_Share(name, self.rank in holders, group if self.rank in places else None, spec))
        return found

    def _group_of(self, places: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of the ranks at ``places`` of this rank's pipeline. Every rank must make the first call."""
        if places not in self._groups:
            size = self.plan.mesh.size
            made = [dist.new_group([place * size + i for place in places]) for i in range(size)]
            self._groups[places] = made[dist.get_rank() % size]
        return self._groups[places]

    # -- running ------------------------------------------------------------------------------------------------------

    def step(
        self,
        program: StepProgram,
        given: Mapping[str, Tensor],
        micro_batches: Sequence[Mapping[str, Tensor]],
        bind: Callable[[fx.GraphModule], None],
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Results and gradients of a step, as `run_step` gives them; results on every rank, gradients of the parameters
        that this rank holds, None for others. ``given`` has of parameters those that it holds."""
        sums, inputs = program.phases.sums, {**given, **micro_batches[0]}
        loaded = self._loaded.get(program) or self._load(program, program.stages, program.phases, inputs, bind)
        assert loaded.run is not None
        for s, channel in loaded.channels.items():
            channel.run = StageRun(loaded.stages[s], sums, given, micro_batches, run_and_release, combine, loaded.last)
            channel.run.begin()
        loaded.run()
        found: dict[str, Tensor] = {}
        results: dict[str, Tensor] = {}
        for channel in loaded.channels.values():
            results |= channel.run.results()
            for name, value in channel.run.end().items():
                found[name] = found[name] + value if name in found else value
        loaded.release()
        places = dict(zip(program.phases.results, program.places, strict=True))
        others = {name: place for name, place in places.items() if name not in loaded.stages[-1].results}
        results |= self._everywhere(program, loaded.stages, others, results)
        return [results[name] for name in places], self._gradients(loaded.shares, found)

    def _gradients(self, shares: Sequence[_Share], found: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The gradients of the parameters that this rank holds, those of several ranks summed up."""
        gradients = list[Tensor | None]()
        for share in shares:
            own = found.get(share.gradient)
            if share.group is not None:
                if own is None:
                    own = torch.zeros(share.spec.shape, dtype=share.spec.dtype, device=self.device)
                own = own.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(own, group=share.group)
            gradients.append(own if share.held else None)
        return gradients

    def _everywhere(
        self,
        program: Emitted,
        stages: Sequence[Stage],
        places: Mapping[str, int],
        found: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Results on every rank, from the ranks that have them. ``places`` are those among the captured outputs, by
        name."""
        results, mesh = dict[str, Tensor](), program.assignment.mesh
        for name, place in places.items():
            source = next(self.ranks[s] for s, stage in enumerate(stages) if name in stage.results)
            if source == self.rank:
                result = found[name].contiguous()
            else:
                val = program.captured.outputs[place].node.meta["val"]
                shape = program.assignment.sinks[place].local_shape(mesh, val.shape)
                result = torch.empty(shape, dtype=val.dtype, device=self.device)
            dist.broadcast(result, group=self.group, group_src=source)
            results[name] = result
        return results

    def evaluate(
        self, special: Specialization, given: Mapping[str, Tensor], bind: Callable[[fx.GraphModule], None]
    ) -> tuple[Tensor, ...]:
        """All results of a forward, on every rank; ``given`` are its inputs, of parameters those that this rank
        holds."""
        if special not in self._loaded:
            inputs = [special.sharded.inputs[node] for node in special.captured.inputs]
            places = range(len(special.sharded.results))
            forward = replace(special.sharded, gradients=())
            phases = cut_phases(forward, special.assignment.mesh, inputs, results=places, merge=False)
            held = {
                special.input_name(p.placeholder): homes((p.name, *p.aliases), special.units)
                for p in special.captured.parameters
            }
            stages = cut_stages(phases, special.units, held, [node.name for node in inputs])
            self._load(special, stages, phases, given, bind)
        loaded = self._loaded[special]
        for s, channel in loaded.channels.items():
            channel.run = StageRun(loaded.stages[s], {}, given, [{}], run_and_release, combine)
            channel.run.begin()
        found = self._forward(loaded.channels)
        loaded.release()
        results = self._everywhere(special, loaded.stages, {n: i for i, n in enumerate(loaded.results)}, found)
        return tuple([results[name] for name in loaded.results])

    def _forward(self, channels: Mapping[int, Channel]) -> dict[str, Tensor]:
        """Run this rank's stages forward, in order; what they end with, by name."""
        sent, found = list[Any](), dict[str, Tensor]()
        for s, channel in channels.items():
            run = channel.run
            if s > 0 and s - 1 not in channels:
                for work in start_p2p(channel.get_fwd_recv_ops(0)):
                    work.wait()
                run.values[0].update(channel.received.pop(("F", 0)))
            run.act("F", 0)
            if s + 1 in channels:
                channels[s + 1].run.values[0].update(run.hand_on("F", 0))
            elif s + 1 < len(self.ranks):
                sent += start_p2p(channel.get_fwd_send_ops(0))
            found |= run.results()
        for work in sent:
            work.wait()
        return found
