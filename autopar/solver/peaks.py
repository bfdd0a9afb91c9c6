"""The fullest moment of a training step, by the life of every tensor of a program that is not emitted.

`peak_of` reads an assignment: what operators and redistributions of it would be emitted, in the order in which they
would run, and when what they make is used for the last time (`solver.tape`, `solver.programs`). What rests between steps
(parameters, optimizer state) is `memory.memory_of`'s. autopar/peak.py finds the same of emitted programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from autopar.cost_model.liveness import TRANSIENTS
from autopar.garbage import collecting_later
from autopar.sharding.assignment import Assignment
from autopar.sharding.operators import Operators
from autopar.sharding.recompute import Kept, blocks_made_again, forward_blocks, made_again
from autopar.sharding.zero import Keeping
from autopar.solver.memory import memory_of
from autopar.solver.microbatches import in_micro_batches, split_inputs
from autopar.solver.programs import life
from autopar.solver.setting import Setting
from autopar.solver.shorten import rows, shorten
from autopar.solver.steps import cut, programs
from autopar.solver.tape import Tape, keep, write
from autopar.solver.templates import Templates

#: Bytes that are alive at one moment, by kind.
Moment = dict[str, int]

ACTIVATIONS, GRADIENTS, COPIES = "activations", "gradients", "copies"

#: What operators become under strategies, of every graph that was asked for.
_TEMPLATES: WeakKeyDictionary[Operators, Templates] = WeakKeyDictionary()


@collecting_later()
def peak_of(
    setting: Setting, assignment: Assignment, held: Kept, keep: Mapping[str, Keeping], micro_batches: int = 1
) -> dict[str, int]:
    """Bytes a device by kind at the fullest moment of a step of so many ``micro_batches``: the kinds of `memory_of`, and
    ``transients``, which live and die within one direction.

    ``held`` is what the backward of ``assignment`` takes over (`sharding.recompute.kept`), ``keep`` how long copies and
    gradients of parameters live (`setting.keepings`).
    """
    memory = memory_of(setting, assignment, held, keep, micro_batches)
    own = _lives(setting, assignment, keep, micro_batches)
    stepped = optimizer_moment(setting, assignment, memory[GRADIENTS])
    if micro_batches == 1:  # copies that are kept from step to step are there while the optimizer runs too
        stepped = _sum(stepped, {COPIES: own.copies})
    return _fullest(memory, [stepped, *_step_moments(own, micro_batches)])


def _fullest(memory: Mapping[str, int], moments: Iterable[Moment]) -> dict[str, int]:
    """What rests, of ``memory``, with the fullest of ``moments``."""
    most = max(moments, key=lambda moment: sum(moment.values()))
    resting = {kind: n for kind, n in memory.items() if kind not in (ACTIVATIONS, GRADIENTS, COPIES)}
    return {kind: resting.get(kind, most.get(kind, 0)) for kind in dict.fromkeys((*memory, TRANSIENTS))}


def optimizer_moment(setting: Setting, assignment: Assignment, gradients: int) -> Moment:
    """The optimizer's step, with ``gradients`` bytes of gradients. torch.optim.AdamW computes the root of the second
    moment and what it is divided by beside the state (torch/optim/adam.py): of all parameters at once on GPUs
    (foreach), of one after the other on CPUs."""
    moment = {GRADIENTS: gradients}
    if setting.optimizer != "adamw" or not gradients:
        return moment
    trained = [p for p in setting.captured.parameters if p.gradient is not None]
    specs = [(assignment.sources[p.placeholder], replace(p.spec, dtype=p.storage_dtype)) for p in trained]
    nbytes = [layout.local_bytes(assignment.mesh, spec) for layout, spec in specs]
    one_by_one = setting.cluster.device.name == "cpu"
    return {**moment, TRANSIENTS: 2 * max(nbytes) if one_by_one else sum(nbytes)}


def _tape(
    setting: Setting, assignment: Assignment, keeping: Mapping[str, Keeping], micro_batches: int
) -> tuple[Tape, list[int], list[int]]:
    """The tape of an assignment, its entries of the batch, and those of the results that a step ends with."""
    captured, operators = setting.captured, setting.operators
    few = blocks_made_again(setting.recompute)
    again = set(forward_blocks(operators)[:few])
    short = shorten(captured, operators, rows(captured, assignment, again.__contains__))
    whole, split = short.assignment(assignment), frozenset(captured.inputs)
    if micro_batches > 1:
        split = split_inputs(captured)
        whole = in_micro_batches(short.captured, short.operators, whole, micro_batches, split, keeping)
    templates = _TEMPLATES.setdefault(operators, Templates())
    tape = write(short, whole, made_again(operators, setting.recompute), templates)
    keep(tape, {name: kept.copy for name, kept in keeping.items()})
    results = [tape.results[i] for i, o in enumerate(captured.outputs) if o.tangent is not None or o.buffer is not None]
    return tape, [tape.inputs[node] for node in captured.inputs if node in split], results


@dataclass(frozen=True)
class StageLife:
    """The fullest moments of one stage's graphs, of one micro-batch: of its forward, of its backward as a whole, and of
    the backward of inputs and of weights apart, all with the activations that they work on; and of the step's end.

    ``saved`` are bytes that a forward leaves for its backward, ``between`` those that the backward of inputs leaves for
    that of weights; ``sums`` those of what micro-batches add up, ``copies`` those that are kept for the step."""

    forward: Moment
    backward: Moment
    input: Moment
    weight: Moment
    finish: Moment
    saved: int
    between: int
    sums: int
    copies: int


def _lives(
    setting: Setting, assignment: Assignment, keeping: Mapping[str, Keeping], micro_batches: int
) -> StageLife:
    """The life of a step that is not cut into stages."""
    tape, given, results = _tape(setting, assignment, keeping, micro_batches)
    step = programs(tape, assignment.mesh, cut(tape, given, results))
    found = step.cut
    kinds = tape.kinds(tape.inputs.values(), None) | tape.kinds(found.ready, None)
    forward = life(step.forward, kinds | tape.kinds(found.saved, ACTIVATIONS), TRANSIENTS)
    saved, sums, backward, finish = tape.bytes(found.saved), 0, Moment(), Moment()
    if step.backward is not None:
        ends = step.backward.outputs
        kinds_of_ends = tape.kinds(ends, GRADIENTS) | tape.kinds(found.saved, ACTIVATIONS)
        backward = life(step.backward, kinds | kinds_of_ends, TRANSIENTS)
        sums = tape.bytes((*found.forward, *ends)) if micro_batches > 1 else 0
    if step.finish is not None:
        finish = life(step.finish, kinds | tape.kinds(found.left, None), TRANSIENTS)
    return StageLife(forward, backward, {}, {}, finish, saved, 0, sums, tape.bytes(found.ready))


def _step_moments(own: StageLife, micro_batches: int) -> Iterator[Moment]:
    """The fullest moments of a step without a pipeline; from the second micro-batch on all are alike."""
    sums = {GRADIENTS: own.sums, COPIES: own.copies}
    yield _sum(own.forward, sums)
    yield _sum(own.backward, sums)
    if micro_batches > 1:
        yield _sum(sums, {GRADIENTS: own.sums})  # while sums and what is added to them are both there
        yield _sum(own.finish, sums)


def _sum(*moments: Moment) -> Moment:
    kinds = dict.fromkeys(kind for moment in moments for kind in moment)
    return {kind: sum(moment.get(kind, 0) for moment in moments) for kind in kinds}
