"""`autopar.verify` of a generation: prompts and the tokens after them, by transformers' loop in eager mode and on
simulated ranks.

Eager mode chooses the tokens, greedily, and every other run is given the same ones, so that one token that differs does
not make all logits after it incomparable. The logits from which each was chosen are compared, and the tokens that the
sharded program would have chosen by them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar._compat import pytree
from autopar.capture import batch_tensors
from autopar.capture.hf_generate import bucket_of, generating
from autopar.runtime.decoding import Forwards, KeptTokens, traced
from autopar.runtime.program import Specialization
from autopar.runtime.reference import ForwardSimulation, assemble, exact_float64
from autopar.runtime.simulate import Traffic
from autopar.runtime.verify import VerifyReport, Ways, judge, least_precise, tensor_errors
from autopar.sharding.layout import Mesh

#: Tokens that are chosen, unless more are asked for: one by the forward of the prompt, the others with a cache.
TOKENS = 5
#: Two logits of eager mode that are no further apart than so many times what is allowed, times their RMS, are as good
#: as equal: either may be rounded to be the larger one. (Two numbers, each four standard deviations off.)
TIE = 8.0


@dataclass(frozen=True)
class PromptBatch:
    """What a generation starts from: the ``inputs`` of ``generate``, and how many tokens are chosen."""

    inputs: dict[str, Tensor]
    tokens: int = TOKENS

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return int(self.inputs["input_ids"].shape[1])


def random_prompts(model: nn.Module, batch: int, length: int, tokens: int) -> PromptBatch:
    """Random ids [batch, length]; every other prompt is shorter by a third, and padded on the left."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1::2, : length // 3] = 0
    return PromptBatch({"input_ids": ids, "attention_mask": mask}, tokens)


def _generate(model: Any, prompts: PromptBatch, ids: Tensor | None) -> Tensor:
    """The ids of greedy generation by ``model``, which are made to be ``ids`` where those are given."""
    given: dict[str, Any] = {}
    if ids is not None:
        given["prefix_allowed_tokens_fn"] = lambda sample, before: [int(ids[sample, before.shape[0]])]
    with torch.no_grad():
        found: Tensor = model.generate(
            **prompts.inputs, **given, do_sample=False, num_beams=1, max_new_tokens=prompts.tokens,
            min_new_tokens=prompts.tokens, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return found


def _eager(
    model: nn.Module, prompts: PromptBatch, ids: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], Tensor]:
    """By a copy of the untouched model in this process, in eager mode, with parameters of floating point in ``dtype``:
    the logits [B, V] from which each token was chosen, and all ids [B, P + tokens]."""
    own, logits = copy.deepcopy(model).eval(), list[Tensor]()
    for p in own.parameters():
        if dtype is not None and p.is_floating_point():
            p.data = p.data.to(dtype)
    own.register_forward_hook(lambda module, args, output: logits.append(output.logits[:, -1].detach()))
    return logits, _generate(own, prompts, ids)


@dataclass(kw_only=True)
class _SimulatedCache(KeptTokens):
    """The pieces of every rank."""

    pieces: list[list[Tensor]] = field(default_factory=list)

    def take(self, special: Specialization, outputs: list[list[Tensor]]) -> None:
        """Keep what the forward of a prompt has left on every rank."""
        places = [place for place, output in enumerate(special.captured.outputs) if output.cached]
        self.pieces = [[self.room(found[place]) for place in places] for found in outputs]
        for place in places:
            self.note(special.captured.outputs[place].node.meta["val"])


#: Makes the program for inputs of some shapes.
Make = Callable[[dict[str, Any]], Specialization]


class _SimulatedForwards(Forwards[_SimulatedCache]):
    """The forwards of one generation on all ranks of ``mesh``, by the programs of ``known``, by shapes of inputs."""

    def __init__(self, model: nn.Module, make: Make, mesh: Mesh, known: dict[str, Specialization]) -> None:
        super().__init__(model)
        self.make, self.mesh, self.known = make, mesh, known
        self.simulations: dict[str, ForwardSimulation] = {}
        self.traffic, self.logits = Traffic(), list[Tensor]()
        #: FLOPs of all forwards, of the whole model.
        self.flops = 0.0

    def make_cache(self, config: Any, kwargs: dict[str, Any], length: int) -> _SimulatedCache:
        """An empty cache for ``length`` tokens."""
        return _SimulatedCache(length=bucket_of(length))

    def first(self, cache: _SimulatedCache, given: dict[str, Any]) -> Any:
        """As `Forwards.first`."""
        special, outputs = self._run(given, [batch_tensors((), given)] * self.mesh.size)
        cache.take(special, outputs)
        return self._whole(special, outputs)

    def later(self, cache: _SimulatedCache, shapes: dict[str, Any], given: dict[str, Any], filled: Tensor) -> Any:
        """As `Forwards.later`."""
        tensors = [batch_tensors((), {**given, "cache": traced(pieces, filled)}) for pieces in cache.pieces]
        return self._whole(*self._run(shapes, tensors))

    def forward(self, *, cache: _SimulatedCache, **kwargs: Any) -> Any:
        """As `Forwards.forward`; the last token's logits are kept."""
        found = super().forward(cache=cache, **kwargs)
        self.logits.append(found["logits"][:, -1])
        return found

    def _run(self, shapes: dict[str, Any], tensors: list[list[Tensor]]) -> tuple[Specialization, list[list[Tensor]]]:
        """The program for inputs of ``shapes``, and its outputs on every rank, which is given its own ``tensors``."""
        key = str(pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), shapes | {"cache": None}))
        key += str([tuple(t.shape) for t in batch_tensors((), shapes)])
        if key not in self.known:
            self.known[key] = self.make(shapes)
        special = self.known[key]
        if key not in self.simulations:
            self.simulations[key] = ForwardSimulation(self.model, special, "none", 0)
        simulation = self.simulations[key]
        values = [simulation.values(0, given, rank) for rank, given in enumerate(tensors)]
        self.flops += sum(op.flops for op in special.operators)
        return special, simulation.forward(special.generation(), values, self.traffic)

    def _whole(self, special: Specialization, outputs: list[list[Tensor]]) -> Any:
        """What the model would have returned; keys and values are those of rank 0."""
        captured, found = special.captured, []
        for place, output in enumerate(captured.outputs):
            pieces, layout = [out[place] for out in outputs], special.assignment.sinks[place]
            shape = tuple(output.node.meta["val"].shape)
            found.append(pieces[0] if output.cached else assemble(pieces, layout, self.mesh, shape))
        tensors, constants = iter(found), dict(captured.output_constants)
        count = captured.output_spec.num_leaves
        return pytree.tree_unflatten(
            [constants[i] if i in constants else next(tensors) for i in range(count)], captured.output_spec
        )


def compare_generation(
    model: nn.Module,
    prompts: PromptBatch,
    make: Make,
    mesh: Mesh,
    dtype: torch.dtype | None,
    notes: tuple[str, ...] = (),
) -> VerifyReport:
    """Generate from ``prompts`` in eager mode and by the programs that ``make`` makes on all ranks of ``mesh``; with
    ``dtype`` parameters are used in that."""
    known: dict[str, Specialization] = {}
    truth, ids = _eager(model, prompts, None, dtype)

    def sharded(model: nn.Module) -> _SimulatedForwards:
        forwards = _SimulatedForwards(copy.deepcopy(model).eval(), make, mesh, known)
        _generate(generating(forwards.model, forwards.forward, forwards.make_cache), prompts, ids)
        return forwards

    def exact(model: nn.Module) -> list[Tensor]:
        with exact_float64():
            return _eager(copy.deepcopy(model).double(), prompts, ids)[0]

    mine = sharded(model)
    narrow = min((least_precise(s) for s in known.values()), key=lambda d: -torch.finfo(d).eps)
    ways = Ways(
        lambda m, draw: _eager(m, prompts, ids, dtype)[0],
        lambda m, draw: exact(m),
        lambda m, draw: sharded(m).logits,
        _errors,
        narrow,
    )
    judged = judge(model, ways, mine.logits, truth)
    others, ties = _other_tokens(mine.logits, truth, TIE * max(judged.allowed.values()))
    same = f"{len(others)} other tokens" if others else "the same tokens"
    said = [f"{len(ids)} prompts of {prompts.length} tokens, {prompts.tokens} greedy ones after each: {same}"]
    if ties:
        said.append(f"{ties} of them were chosen between logits that are as good as equal in {str(narrow)[6:]}")
    return VerifyReport(
        judged.ok and not others,
        judged.errors[judged.worst],
        others[0] if judged.ok and others else judged.worst,
        judged.allowed[judged.worst],
        judged.errors,
        {},
        None,
        mine.traffic.flops / mine.flops if mine.flops else 1.0,
        mine.traffic,
        mesh.size,
        (*notes, *said, *judged.notes),
    )


def _errors(found: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    """The errors of the logits from which each token was chosen."""
    pairs = enumerate(zip(found, truth, strict=True))
    return {f"logits of token {step}": tensor_errors({"": a}, {"": b})[""] for step, (a, b) in pairs}


def _other_tokens(logits: list[Tensor], truth: list[Tensor], tie: float) -> tuple[list[str], int]:
    """The tokens that are others than eager's by name, and how many more are, whose logits differ by less than ``tie``
    times their RMS."""
    others, ties = [], 0
    for step, (found, right) in enumerate(zip(logits, truth, strict=True)):
        found, right = found.double(), right.double()
        rms, mine, theirs = right.square().mean().sqrt(), found.argmax(-1), right.argmax(-1)
        for sample in (mine != theirs).nonzero().flatten().tolist():
            gap = right[sample, theirs[sample]] - right[sample, mine[sample]]
            if gap <= tie * rms and not found[sample].isnan().any():
                ties += 1
            else:
                others.append(f"token {step} of sample {sample}")
    return others, ties
