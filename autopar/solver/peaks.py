"""The fullest moment of a training step, by the life of every tensor of a program that is not emitted.

`peaks_of` reads an assignment: what operators and redistributions of it would be emitted, in the order in which they
would run, and when what they make is used for the last time (`solver.tape`, `solver.programs`). What rests between
steps (parameters, optimizer state) is `memory.memory_of`'s. tests/emitted_peaks.py finds the same of emitted programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cost_model.bubble import script
from autopar.cost_model.hardware import Device
from autopar.cost_model.memory import FRAGMENTATION
from autopar.garbage import collecting_later
from autopar.schedule import Step as ScheduleStep
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import MICRO_BATCH, Mesh
from autopar.sharding.operators import Operators, of_graph
from autopar.sharding.recompute import Kept, MadeAgain, blocks_made_again, forward_blocks, made_again
from autopar.sharding.stages import homes
from autopar.sharding.zero import Keeping
from autopar.solver.memory import memory_of
from autopar.solver.microbatches import in_micro_batches, split_inputs
from autopar.solver.pipeline import Pipeline
from autopar.solver.programs import Program, life
from autopar.solver.setting import Setting
from autopar.solver.shorten import Short, alike_stages, rows, shorten
from autopar.solver.stage_cut import StagePrograms, stage_programs
from autopar.solver.steps import Cut, cut, programs
from autopar.solver.tape import Tape, keep, write
from autopar.solver.templates import Templates

#: Bytes that are alive at one moment, by kind.
Moment = dict[str, int]

ACTIVATIONS, GRADIENTS, COPIES = "activations", "gradients", "copies"
#: What lives and dies within one direction.
TRANSIENTS = "transients"
#: What no tensor has: the device's context and its libraries' buffers, and gaps between what comes and goes.
WORKSPACE, SLACK = "workspace", "slack"
#: Kinds of collectives that Gloo runs on a copy of its own, which no tensor of ours is (ProcessGroupGloo.cpp). NCCL
#: works on what it is given, until it is waited for.
COPIED_BY_GLOO = frozenset({"reduce_scatter"})


@of_graph
def _templates(operators: Operators) -> Templates:
    """What operators become under strategies, written as it is asked for."""
    return Templates()


@collecting_later()
def peaks_of(
    setting: Setting,
    assignment: Assignment,
    held: Kept,
    keep: Mapping[str, Keeping],
    micro_batches: int = 1,
    pipeline: Pipeline | None = None,
) -> tuple[dict[str, int], ...]:
    """Bytes a device by kind at the fullest moment of a step of so many ``micro_batches``, of every rank of the
    pipeline, of one rank without: the kinds of `memory_of`, ``transients``, which live and die within one direction,
    and on devices that have them ``workspace`` (`Device.context_bytes`) and the allocator's ``slack``
    (`cost_model.memory.FRAGMENTATION`).

    ``held`` is what the backward of ``assignment`` takes over (`sharding.recompute.kept`), ``keep`` how long copies and
    gradients of parameters live (`setting.keepings`). Raises MicroBatchError where the model mixes samples.
    """
    if pipeline is not None:
        lives = stage_lives(setting, assignment, keep, micro_batches, pipeline)
        return of_ranks(setting, assignment, keep, micro_batches, pipeline, lives)
    memory = memory_of(setting, assignment, held, keep, micro_batches)
    own = step_life(setting, assignment, keep, micro_batches)
    stepped = optimizer_moment(setting, assignment, memory[GRADIENTS])
    if micro_batches == 1:  # copies that are kept from step to step are there while the optimizer runs too
        stepped = _sum(stepped, {COPIES: own.copies})
    ahead = (micro_batches - 1) * own.saved if setting.forwards_first else 0
    return (fullest(setting.cluster.device, memory, [stepped, *_step_moments(own, micro_batches, ahead)]),)


def fullest(device: Device, memory: Mapping[str, int], moments: Iterable[Moment]) -> dict[str, int]:
    """What rests, of ``memory``, with the fullest of ``moments``; and on devices with a context of their own what that
    and the gaps of the allocator take."""
    most = max(moments, key=lambda moment: sum(moment.values()))
    resting = {kind: n for kind, n in memory.items() if kind not in (ACTIVATIONS, GRADIENTS, COPIES)}
    found = {kind: resting.get(kind, most.get(kind, 0)) for kind in dict.fromkeys((*memory, *most, TRANSIENTS))}
    if device.context_bytes:
        found[WORKSPACE] = device.context_bytes
        found[SLACK] = int(FRAGMENTATION * (found.get(ACTIVATIONS, 0) + found[TRANSIENTS]))
    return found


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
    setting: Setting,
    assignment: Assignment,
    keeping: Mapping[str, Keeping],
    micro_batches: int,
    short: Short,
    inside: frozenset[fx.Node],
) -> tuple[Tape, list[int], Cut]:
    """The tape of an assignment, its entries of the batch, and how a step is cut."""
    captured, operators = setting.captured, setting.operators
    whole, split = short.assignment(assignment), frozenset(captured.inputs)
    if micro_batches > 1:
        split = split_inputs(captured)
        whole = in_micro_batches(short.captured, short.operators, whole, micro_batches, split, keeping)
    again = made_again(operators, setting.recompute)
    tape = write(short, whole, MadeAgain(again.operators | inside, again.moves), _templates(operators))
    keep(tape, {name: kept.copy for name, kept in keeping.items()})
    if setting.cluster.device.name == "cpu":
        tape.copied = COPIED_BY_GLOO
    wanted = [i for i, o in enumerate(captured.outputs) if o.tangent is not None or o.buffer is not None]
    results = [tape.results[i] for i in wanted or range(len(captured.outputs))]
    given = [tape.inputs[node] for node in captured.inputs if node in split]
    return tape, given, cut(tape, given, results)


def _is_made_again(setting: Setting) -> Callable[[str], bool]:
    """Whether a block, by path, is made again in full."""
    few = blocks_made_again(setting.recompute)
    return set(forward_blocks(setting.operators)[:few]).__contains__


@dataclass(frozen=True)
class StageLife:
    """The fullest moments of one stage's graphs, of one micro-batch: of its forward, of its backward as a whole, and of
    the backward of inputs and of weights apart, all with the activations that they work on; and of the step's end.
    Backwards after the first add to the sums that it has left, beside which they are ``adding`` and ``adding_weight``.

    ``saved`` are bytes that a forward leaves for its backward, ``between`` those that the backward of inputs leaves for
    that of weights; ``sums`` those of what micro-batches add up, ``copies`` those that are kept for the step."""

    forward: Moment
    backward: Moment
    input: Moment
    weight: Moment
    adding: Moment
    adding_weight: Moment
    finish: Moment
    saved: int
    between: int
    sums: int
    copies: int


def step_life(
    setting: Setting,
    assignment: Assignment,
    keeping: Mapping[str, Keeping],
    micro_batches: int,
    inside: frozenset[fx.Node] = frozenset(),
) -> StageLife:
    """The life of a step that is not cut into stages. What the operators ``inside`` make never leaves a kernel: it
    takes no bytes, and those of the forward are run again in the backward, from what enters them."""
    short = shorten(setting.captured, setting.operators, rows(setting.captured, assignment, _is_made_again(setting)))
    tape, _, found = _tape(setting, assignment, keeping, micro_batches, short, inside)
    step, hidden = programs(tape, _mesh(assignment, micro_batches), found), _hidden(tape, inside)
    forward = life(step.forward, _kinds(tape, found, found.saved) | hidden, TRANSIENTS)
    sums, backward, adding, finish = 0, Moment(), Moment(), Moment()
    if step.backward is not None:
        ends = step.backward.outputs
        backward = life(step.backward, _kinds(tape, found, found.saved, ends) | hidden, TRANSIENTS)
        adding = life(replace(step.backward, outputs=[]), _kinds(tape, found, found.saved) | hidden, TRANSIENTS)
        sums = tape.bytes((*found.forward, *ends)) if micro_batches > 1 else 0
    if step.finish is not None:
        finish = life(step.finish, _kinds(tape, found) | tape.kinds(found.left, None), TRANSIENTS)
    saved, copies = tape.bytes(found.saved), tape.bytes(found.ready)
    return StageLife(forward, backward, {}, {}, adding, {}, finish, saved, 0, sums, copies)


def _hidden(tape: Tape, inside: frozenset[fx.Node]) -> dict[int, str | None]:
    """The storages of what never leaves a kernel, which are not counted."""
    made = [i for i, entry in enumerate(tape.entries) if entry.owner in inside and not entry.view]
    return tape.kinds(made, None)


def _mesh(assignment: Assignment, micro_batches: int) -> Mesh:
    """The mesh of a tape's programs."""
    axes = ((MICRO_BATCH, micro_batches),) if micro_batches > 1 else ()
    return Mesh((*axes, *assignment.mesh.axes))


def _kinds(tape: Tape, found: Cut, saved: Iterable[int] = (), ends: Iterable[int] = ()) -> dict[int, str | None]:
    """The kinds of storages: what enters and what is there once a step is not counted."""
    given = tape.kinds(tape.inputs.values(), None)
    return tape.kinds(ends, GRADIENTS) | tape.kinds(saved, ACTIVATIONS) | tape.kinds(found.ready, None) | given


def of_ranks(
    setting: Setting,
    assignment: Assignment,
    keeping: Mapping[str, Keeping],
    micro_batches: int,
    pipeline: Pipeline,
    lives: Sequence[StageLife],
) -> tuple[dict[str, int], ...]:
    """The fullest moment of every rank of a pipeline, of the ``lives`` of its stages."""
    plan = script(pipeline.schedule, pipeline.pp, len(pipeline.stages), micro_batches)
    held = {p.name: homes((p.name, *p.aliases), pipeline.stages) for p in setting.captured.parameters}
    found = []
    for rank, row in enumerate(plan.rows):
        stages = [s for s, other in enumerate(plan.ranks) if other == rank]
        own = tuple(
            p
            for p in setting.captured.parameters
            if held[p.name].intersection(stages)
        )
        part = replace(setting, captured=replace(setting.captured, parameters=own))
        memory = memory_of(part, assignment, Kept(), keeping, micro_batches)
        stepped = optimizer_moment(part, assignment, memory[GRADIENTS])
        found.append(fullest(setting.cluster.device, memory, [stepped, *row_moments(row, lives, stages)]))
    return tuple(found)


def stage_lives(
    setting: Setting,
    assignment: Assignment,
    keeping: Mapping[str, Keeping],
    micro_batches: int,
    pipeline: Pipeline,
    inside: frozenset[fx.Node] = frozenset(),
) -> list[StageLife]:
    """The life of every stage of a pipeline; those that are alike are looked at once. ``inside`` as in `step_life`."""
    captured, operators, again = setting.captured, setting.operators, _is_made_again(setting)
    like = alike_stages(captured, assignment, again, pipeline.stages)
    kept = sorted(set(like))
    stage = {path: s for s, names in enumerate(pipeline.stages) for path in names}
    skipped = [s for s in range(len(like)) if s not in kept]
    left_out = rows(captured, assignment, again, lambda path: stage.get(path, 0), skipped)
    short = shorten(captured, operators, left_out)
    tape, given, found = _tape(setting, assignment, keeping, micro_batches, short, inside)
    mesh = _mesh(assignment, micro_batches)
    parts = stage_programs(tape, captured, mesh, found, pipeline.stages, given, kept)
    hidden = _hidden(tape, inside)
    lives = {s: _life_of_stage(tape, found, part, hidden) for s, part in parts.items()}
    return [lives[s] for s in like]


def _life_of_stage(tape: Tape, found: Cut, part: StagePrograms, hidden: Mapping[int, str | None]) -> StageLife:
    """The life of one stage; ``hidden`` storages are not counted."""
    saved, ends = part.saved, part.backward.outputs[: len(part.ends)]

    def alive(program: Program, kept: Iterable[int], ends: Iterable[int]) -> Moment:
        return life(program, {**_kinds(tape, found, kept, ends), **hidden}, TRANSIENTS)

    def adding(program: Program, kept: Iterable[int]) -> Moment:
        others = [i for i in program.outputs if i not in part.ends]
        return alive(replace(program, outputs=others), kept, ())

    finish = Moment()
    if part.finish is not None:
        finish = life(part.finish, _kinds(tape, found) | tape.kinds(found.left, None), TRANSIENTS)
    return StageLife(
        alive(part.forward, saved, ()),
        alive(part.backward, saved, ends),
        alive(part.input, (*saved, *part.between), ()),
        alive(part.weight, part.between, part.weight.outputs),
        adding(part.backward, saved),
        adding(part.weight, part.between),
        finish,
        tape.bytes(saved),
        tape.bytes(part.between),
        tape.bytes(ends),
        tape.bytes(part.ready),
    )


def row_moments(row: Sequence[ScheduleStep], lives: Sequence[StageLife], stages: Sequence[int]) -> Iterator[Moment]:
    """The moments of one rank's row of actions: beside each of them is what its other micro-batches have saved, and
    what stages have summed up."""
    copies = sum(lives[s].copies for s in stages)
    held: dict[tuple[int, int], int] = {}
    summed: dict[int, int] = {}
    seen = set[tuple[int, str, int, int]]()
    total = 0
    for action in (action for step in row for action in step):
        own, key = lives[action.stage], (action.stage, action.micro_batch)
        total -= held.pop(key, 0)
        sums = sum(summed.values())
        if (state := (action.stage, action.kind, total, sums)) not in seen:
            seen.add(state)
            beside = {ACTIVATIONS: total, GRADIENTS: sums, COPIES: copies}
            kinds = {"F": own.forward, "B": own.backward, "I": own.input, "W": own.weight}
            if action.stage in summed:
                kinds |= {"B": own.adding, "W": own.adding_weight}
            yield _sum(kinds[action.kind], beside)
        left = {"F": own.saved, "I": own.between}.get(action.kind, 0)
        if left:
            held[key] = left
            total += left
        if action.kind in "BW":
            summed[action.stage] = own.sums
    for s in stages:
        yield _sum(lives[s].finish, {GRADIENTS: sum(summed.values()), COPIES: copies})


def _step_moments(own: StageLife, micro_batches: int, ahead: int) -> Iterator[Moment]:
    """The fullest moments of a step without a pipeline; from the second micro-batch on all are alike, but for bytes
    that forwards ``ahead`` of the first backward have saved."""
    sums = {GRADIENTS: own.sums, COPIES: own.copies}
    yield _sum(own.forward, {COPIES: own.copies, ACTIVATIONS: ahead} if ahead else sums)
    if micro_batches == 1:
        yield _sum(own.backward, sums)
    else:
        if ahead:
            yield _sum(own.backward, {COPIES: own.copies, ACTIVATIONS: ahead})
        yield _sum(own.adding, sums, {ACTIVATIONS: max(ahead - own.saved, 0)})
        yield _sum(own.finish, sums)


def _sum(*moments: Moment) -> Moment:
    kinds = dict.fromkeys(kind for moment in moments for kind in moment)
    return {kind: sum(moment.get(kind, 0) for moment in moments) for kind in kinds}
