"""Generation over all ranks: transformers' loop on each, emitted programs for its forwards, a cache that is split.

Every rank runs the same loop on the whole logits, so all of them choose the same tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar._compat import pytree
from autopar.capture.hf_generate import bucket_of, generating, why_not
from autopar.errors import InputError
from autopar.runtime.batches import check_alike, contents
from autopar.runtime.decoding import Forwards, KeptTokens, traced
from autopar.runtime.parameters import as_dtensor
from autopar.runtime.process import host_group, placements
from autopar.runtime.program import Specialization
from autopar.runtime.results import rebuild
from autopar.sharding.layout import Layout, Mesh
from autopar.workload import Workload

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

#: What ranks do that differ in a generation, and what to change.
OTHER_PROMPT = (
    "generate from another prompt, or by other numbers",
    "give all ranks the same inputs and the same options, and for sampling torch.manual_seed(seed) with one seed on "
    "every rank before generate()",
)


@dataclass(kw_only=True)
class SplitCache(KeptTokens):
    """This rank's ``pieces`` of the keys and values."""

    mesh: Mesh
    device_mesh: DeviceMesh
    pieces: list[Tensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sample ``i`` be what ``beam_idx[i]`` was, a beam of the same sample: those of other ranks are fetched, by
        all ranks together."""
        for i, (piece, layout, shape) in enumerate(zip(self.pieces, self.layouts, self.shapes, strict=True)):
            rows, taken = self._rows(layout, shape[0]), beam_idx.to(piece.device)
            share = shape[0] // layout.splits(self.mesh, 0)
            places = torch.arange(shape[0], device=piece.device)
            if bool((taken // share == places // share).all()):  # nobody needs what another rank has
                self.pieces[i] = piece.index_select(0, taken[rows] - rows[0])
            else:
                self.pieces[i] = self._whole_batch(piece, layout, shape).index_select(0, taken[rows])

    def _rows(self, layout: Layout, batch: int) -> Tensor:
        """The samples of which this rank has a piece."""
        every = torch.arange(batch, device=self.device_mesh.device_type)
        return Layout(layout.dims[:1]).local_slice(self.mesh, every, dist.get_rank())

    def _whole_batch(self, piece: Tensor, layout: Layout, shape: torch.Size) -> Tensor:
        """All samples of this rank's heads."""
        together = Layout(((), *layout.dims[1:]))
        whole = as_dtensor(piece, layout, self.mesh, self.device_mesh, shape)
        return whole.redistribute(placements=placements(together, self.mesh)).to_local()

    def take(self, special: Specialization, results: dict[int, Tensor]) -> None:
        """Keep what the forward of a prompt has left: takes it out of ``results``, by place, one after the other, so
        that not all of it is there twice."""
        for place, output in enumerate(special.captured.outputs):
            if output.cached:
                self.pieces.append(self.room(results.pop(place)))
                self.layouts.append(special.assignment.sinks[place])
                self.note(output.node.meta["val"])


def generate(module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``module.generate(*args, **kwargs)``: see `ParallelModule.generate`."""
    _refuse(module)
    device = torch.device(module.device_mesh.device_type)
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
    steps = _Steps(module, contents(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)))
    return generating(module._original, steps.forward, steps.make_cache).generate(*args, **kwargs)


def _refuse(module: ParallelModule) -> None:
    """InputError for a module that cannot generate."""
    why = why_not(module._original)
    change = "generate with the original model"
    if why is None and module._pipeline is not None:
        why = "the plan has pipeline stages, which would wait for one another at every token"
        change = "plan for it: Workload(mode='infer'), or Hints(pp=1)"
    if why is None and module._programs.inputs == "local":
        why = "with inputs='local' ranks would generate from other prompts, for other numbers of steps"
        change = "parallelize(..., inputs='global') and pass all prompts on every rank"
    if why is not None:
        raise InputError(
            "this module cannot generate over ranks",
            expected="a decoder of transformers, split without pipeline stages, that is given global batches",
            found=why,
            change=change,
        )


def _generator_state(device_type: str) -> str:
    """A digest of the state of the generator that the loop draws from."""
    return contents([torch.cuda.get_rng_state() if device_type == "cuda" else torch.get_rng_state()])


class _Steps(Forwards[SplitCache]):
    """The forwards of one generation from a prompt of these ``words``, by all ranks together."""

    def __init__(self, module: ParallelModule, words: str) -> None:
        super().__init__(module._original)
        self.module, self.words = module, words
        #: Those of every program that has run: to look them up by name takes as long as a small layer.
        self.parameters: dict[Specialization, list[Tensor]] = {}

    def make_cache(self, config: Any, kwargs: dict[str, Any], length: int) -> SplitCache:
        """An empty cache for ``length`` tokens. RuntimeFailure, on all ranks, if they are about to generate different
        things; InputError if the plan has no memory for so many tokens."""
        numbers = _generator_state(self.module.device_mesh.device_type) if config.do_sample else "none drawn"
        options = hashlib.sha256(repr(config.to_dict()).encode()).hexdigest()[:12]
        words = f"prompt {self.words}, options {options}, random numbers {numbers}"
        check_alike(words, host_group(), OTHER_PROMPT)
        workload, room = Workload.from_dict(self.module.plan.workload), bucket_of(length)
        if workload.mode == "infer" and workload.seq_len is not None:
            if length > workload.seq_len:
                raise InputError(
                    "the plan has no memory for so many tokens",
                    expected=f"at most {workload.seq_len} tokens of prompt and answer, the workload's seq_len",
                    found=f"{length} tokens to keep",
                    change="generate fewer (max_new_tokens), or plan with a larger seq_len",
                )
            room = min(room, workload.seq_len)
        return SplitCache(length=room, mesh=self.module.mesh, device_mesh=self.module.device_mesh)

    def first(self, cache: SplitCache, given: dict[str, Any]) -> Any:
        """As `Forwards.first`."""
        special, results = self._run(given, given)
        cache.take(special, results)
        return self._rebuilt(special, results)

    def later(self, cache: SplitCache, shapes: dict[str, Any], given: dict[str, Any], filled: Tensor) -> Any:
        """As `Forwards.later`."""
        return self._rebuilt(*self._run(shapes, {**given, "cache": traced(cache.pieces, filled)}))

    def _rebuilt(self, special: Specialization, results: dict[int, Tensor]) -> Any:
        found = rebuild(special, results, results.__getitem__, self.module.device_mesh, None)
        found["logits"] = found["logits"].whole()
        return found

    def _run(self, shapes: dict[str, Any], given: dict[str, Any]) -> tuple[Specialization, dict[int, Tensor]]:
        """Run the program for inputs of ``shapes``, those of the cache whole and on the meta device, on what is
        ``given``, this rank's pieces of the cache: the results by place."""
        module = self.module
        special = module._programs.cached(shapes)
        values = module._given(special, (), given)
        if special not in self.parameters:
            named = special.captured.parameters
            self.parameters[special] = [module._original.get_parameter(p.name) for p in named]
        results = module._evaluate(special, values, self.parameters[special], Specialization.generation)
        return special, dict(enumerate(results))
