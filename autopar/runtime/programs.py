"""The programs of a parallel module: made for a batch's shapes and modes, the same on every rank, kept, and bound."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import pytree
from autopar.capture import batch_tensors
from autopar.errors import RuntimeFailure
from autopar.passes.bind import bind
from autopar.passes.partition import Program
from autopar.plan import Plan
from autopar.runtime.attributes import States
from autopar.runtime.autocast import autocast_state
from autopar.runtime.batches import check_alike, check_parts, compares_contents, contents, describe, warn_of
from autopar.runtime.cache import Cache, CacheEntry
from autopar.runtime.failure import watch
from autopar.runtime.process import group_names, group_places, host_group
from autopar.runtime.program import Maker, Makers, Specialization, StepProgram
from autopar.runtime.release import COMPILE
from autopar.sharding.axes import data_rank


def _has_loss(program: Specialization | StepProgram) -> bool:
    """Whether every run of a program ends with a number of all ranks."""
    return any(o.tangent is not None and o.node.meta["val"].dim() == 0 for o in program.captured.outputs)


@dataclass
class Programs:
    """Makes and keeps the programs of ``model`` under ``plan`` by ``makers``. ``device_mesh`` is that of this rank's
    stage; ``compiles`` has graphs compiled. ``told`` are the warnings that this module has given, ``calls`` counts
    batches."""

    model: nn.Module
    plan: Plan
    makers: Makers
    device_mesh: DeviceMesh
    inputs: str
    compiles: bool
    cache: Cache[Any] = field(default_factory=Cache)
    bound_to: weakref.WeakKeyDictionary[Specialization, dict[str, Program]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    told: set[tuple[str, int | None]] = field(default_factory=set)
    #: Whether mixtures have come to count their tokens.
    counts: bool = False
    calls: int = 0
    #: What all ranks have asked for in the last call, if they wait for one another in every run of it.
    agreed: tuple[Any, ...] | None = None
    #: Names of process groups, by axis.
    groups: dict[str, str] = field(init=False)
    states: States = field(init=False)
    #: Those of ``model``: to walk through its modules in every call takes a millisecond.
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = group_names(self.device_mesh, self.plan.mesh)
        self.parameters = list(self.model.parameters())
        self.states = States(self.model)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        """The program of a forward and its backward."""
        found: Specialization = self._take("forward", args, kwargs, self._load)
        return found

    def cached(self, kwargs: dict[str, Any]) -> Specialization:
        """The program of a forward with a cache, whose tensors are on the meta device."""
        found: Specialization = self._take("generate", (), kwargs, self._load_cached)
        return found

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepProgram:
        """The program of a whole step, bound to this process unless a pipeline cuts it further."""
        found: StepProgram = self._take("step", args, kwargs, self._load_step)
        return found

    def bound(self, special: Specialization, make: Callable[[Specialization], Program]) -> Program:
        """A program of a specialisation, bound to this process when it is first used."""
        programs: dict[str, Program] = self.bound_to.setdefault(special, {})
        if make.__name__ not in programs:
            program = programs[make.__name__] = make(special)
            copies = program.copies.module if program.copies is not None else None
            for graph in (program.forward, program.backward, copies):
                if graph is not None:
                    self.bind(graph)
        return programs[make.__name__]

    def _take(
        self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], load: Callable[[tuple[Any, ...], Any], Any]
    ) -> Any:
        """What ``load`` makes for a batch's shapes, or has made before. RuntimeFailure if ranks ask for different
        things.

        A rank that is to run on a global batch what all ranks ran in the call before does not ask them about it. Local
        batches can be of other sizes on some ranks at the end of an epoch, and are always asked about.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        frozen = tuple(p.requires_grad for p in self.parameters)
        casts = autocast_state(self.device_mesh.device_type)
        key = (what, str(spec), repr(shapes), self.states.now(), frozen, self.counts, casts)
        entry = CacheEntry(tuple(tuple(t.shape) for t in batch_tensors(args, kwargs)), self.model.training)
        kept = "kept" if key in self.cache else "not made yet"
        modes = f"{what}, training={self.model.training}, gradients={torch.is_grad_enabled()}, {casts}, program {kept}"
        asked = (key, torch.is_grad_enabled())
        is_known, self.agreed = asked == self.agreed and self.inputs == "global", None
        self._check_batch(args, kwargs, modes, is_known)
        found = self.cache.take(key, entry, lambda: load(args, kwargs))
        self.agreed = asked if _has_loss(found) else None
        return found

    def _check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: str, is_known: bool) -> None:
        """RuntimeFailure on all ranks if their batches differ: in shapes unless this ``is_known``, in contents now and
        then."""
        words, compared = f"{describe(args, kwargs)}; {modes}", compares_contents(self.calls)
        self.calls += 1
        tensors = [t for t in batch_tensors(args, kwargs) if not t.is_meta]
        digest = contents(tensors) if compared and dist.get_world_size() > 1 else ""
        whole = self.inputs == "global"
        self.compare(f"{words}; contents {digest}" if digest and whole else words, asks=compared or not is_known)
        if digest and not whole:
            check_parts(data_rank(self.plan.mesh, dist.get_rank()), digest, host_group())

    def compare(self, words: str, asks: bool = True) -> None:
        """RuntimeFailure on all ranks if they have other ``words`` for a batch. A rank that does not ask the others
        goes on; if one of them does ask, both hang until the watch ends them with that error."""
        if (watched := watch()) is not None:
            watched.note(words)
        if asks:
            check_alike(words, host_group())

    def _load(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], make: Maker[Specialization] | None = None
    ) -> Specialization:
        """Make a program, of a forward and its backward unless ``make`` makes another, and compare it between ranks."""
        make = make or self.makers.forward
        special = make(self.model, self.plan, args, kwargs, training=self.model.training, inputs=self.inputs)
        self._compare(special.program.hash())
        if dist.get_rank() == 0:
            warn_of(special.fallbacks, self.told)
        return special

    def _load_cached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        """`_load` for a forward with a cache."""
        return self._load(args, kwargs, self.makers.cached)

    def _load_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepProgram:
        """Make the program of a step, compare it between ranks and bind it to this process."""
        program = self.makers.step(
            self.model, self.plan, args, kwargs, training=self.model.training, inputs=self.inputs
        )
        self._compare(program.hash())
        if self.plan.degrees["pp"] == 1:
            for phase in program.phases.all():
                self.bind(phase.module)
        return program

    def bind(self, graph: fx.GraphModule) -> None:
        """Bind a graph to this process."""
        places = group_places(self.device_mesh, self.plan.mesh)
        bind(graph, self.groups, places, torch.device(self.device_mesh.device_type))
        graph.meta[COMPILE] = self.compiles

    def _compare(self, program_hash: str) -> None:
        """Ranks must run the same program, or they would wait for one another for ever."""
        hashes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, program_hash)
        different = [rank for rank, h in enumerate(hashes) if h != hashes[0]]
        if different:
            raise RuntimeFailure(
                f"ranks {different} made another program than rank 0",
                expected="the same model, batch shapes, plan and versions on every rank",
                found=f"{len(set(hashes))} different programs",
                change="pass the same global batch shapes on every rank, run one version of the code, and let no loop "
                "over a set decide in which order the model computes (or set PYTHONHASHSEED=0 for all ranks)",
            )
