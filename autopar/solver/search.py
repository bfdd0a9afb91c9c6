"""The search for a plan: candidates of the outer search are solved, and the fastest that fits becomes the plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from autopar.capture.graph import Captured, Parameter
from autopar.cluster import Cluster
from autopar.errors import HintError, InfeasibleError
from autopar.garbage import collecting_later
from autopar.hint_checks import AXES, EXPERTS, check_recompute
from autopar.hints import Hints, check_hints
from autopar.plan import Alternative, ParameterPlan, Plan
from autopar.report.describe import describe_layers, describe_replicated
from autopar.report.progress import Progress, progress
from autopar.report.units import bytes_text, seconds_text
from autopar.schedule import ALL_SCHEDULES, FORWARDS_FIRST, check_schedule, check_stages
from autopar.sharding.assignment import Assignment, ranks_of_experts, used_axes
from autopar.sharding.axes import data_degree, expert_ranks, zero_group_size
from autopar.sharding.operators import Operators, inside_experts
from autopar.sharding.recompute import forward_blocks
from autopar.sharding.zero import Zero
from autopar.solver.attempt import Found
from autopar.solver.candidates import Candidate, Limits, able_chunks, all_degrees
from autopar.solver.carry import hint_pins, operator_choices
from autopar.solver.constraints import check_constraints
from autopar.solver.estimate import Estimate
from autopar.solver.estimates import CONTEXT_TOKENS, Estimates
from autopar.solver.frame import Frame, Known, Prompts
from autopar.solver.layer_costs import flops_by_dtype, layer_costs
from autopar.solver.microbatches import loss_place
from autopar.solver.outer import Solver, least_memory, small_plans
from autopar.solver.parts import forwards_first, runs_in_parts, why_whole
from autopar.solver.pipeline import hinted, units
from autopar.solver.setting import Setting, is_sharded
from autopar.solver.spmd import read
from autopar.solver.staged import Stages
from autopar.workload import Workload

#: Of what did not fit, how much the plan says.
UNFIT_SHOWN = 3


def gap_space(has_experts: bool) -> str:
    """What `Plan.gap` is a bound over, of a model that ``has_experts`` or not."""
    over = "over tp, cp or as much of it as can be, and none, a host's or as many as can be of the ranks of dp"
    return (
        f"all meshes pp x dp x cp x tp (tp within the fast links of a host, cp with {CONTEXT_TOKENS} tokens a rank or "
        "more, unless hinted or nothing else fits), kinds of ZeRO, micro-batches and schedules; batch over dp, "
        f"sequence over cp{f', experts {over}' if has_experts else ''}; matrix products and attention split on every "
        "axis, weights over tp; others follow an operand; equal blocks alike"
    )


def structure_hash(names_and_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """SHA-256 of a model's parameters, by name and shape."""
    return hashlib.sha256(repr(sorted(names_and_shapes)).encode()).hexdigest()


@collecting_later()
def search(
    model: nn.Module,
    captured: Captured,
    cluster: Cluster,
    workload: Workload,
    hints: Hints,
    compiled: bool = False,
    seconds: float | None = None,
    known: Known | None = None,
    prompts: Prompts | None = None,
) -> Plan:
    """The fastest plan that fits, of graphs that are ``compiled`` or run operator by operator, and in which the
    ``prompts`` of a generation fit too. After ``seconds`` the best so far is taken. What is ``known`` already is shared
    with other searches of the same model, cluster and workload. Raises HintError, MicroBatchError and
    InfeasibleError."""
    frame = replace(make_frame(captured, cluster, workload, hints, compiled, known), prompts=prompts)
    with progress() as line:
        return _Search(model, frame, workload, seconds, line).plan()


@collecting_later()
def has_plan(
    captured: Captured,
    cluster: Cluster,
    workload: Workload,
    hints: Hints,
    compiled: bool = False,
    known: Known | None = None,
    prompts: Prompts | None = None,
) -> bool:
    """Whether `search` finds a plan: whether one of those that need the fewest bytes fits. Which one would be fastest
    is not asked, so the answer takes a small part of the time."""
    with progress() as line:
        try:
            frame = replace(make_frame(captured, cluster, workload, hints, compiled, known), prompts=prompts)
            small = small_plans(Estimates(frame, line), frame.budget)
            return any(f.needed <= frame.budget for f in small)
        except (HintError, InfeasibleError):
            return False


def make_frame(
    captured: Captured, cluster: Cluster, workload: Workload, hints: Hints, compiled: bool, known: Known | None = None
) -> Frame:
    """What a search is for. HintError for hints that cannot be kept, whatever is chosen besides."""
    known = known or Known()
    shapes = {name: p.spec.shape for p in captured.parameters for name in (p.name, *p.aliases)}
    check_hints(hints, cluster.size, shapes)
    operators = known.operators = known.operators or read(captured, imbalance=workload.expert_imbalance)
    check_constraints(operators, hints)
    zero = Zero(hints.zero, hints.reshard_after_forward is not False)
    setting = Setting(captured, operators, cluster, workload.optimizer, hints.recompute or "none", zero, compiled)
    check_recompute(setting.recompute, len(forward_blocks(operators)))
    row = units(captured, operators)
    batch = workload.global_batch or 1
    stages = None
    if hints.stages is not None:
        stages = len(hinted(row, hints.stages))
        check_stages(hints.schedule or "1f1b", hints.pp or 1, stages)
    infers = workload.mode == "infer"
    if infers and (hints.pp or 1) > 1:
        raise HintError(
            f"The hint pp={hints.pp} cannot be kept: inference does not run in a pipeline.",
            expected="pp=1, or no hint: stages would wait for one another at every token",
            found=f"pp={hints.pp} with Workload(mode='infer')",
            change="leave pp out; tp and dp split the model and what it keeps of past tokens",
        )
    parts = not infers and runs_in_parts(captured, operators, batch)
    size = hints.micro_batch_size
    if not parts and not infers and size is not None and size < batch:
        loss_place(captured)  # says what is wrong, if that is it
        if size * (hints.dp or cluster.size) < batch:  # more than one micro-batch, whatever dp is
            why_whole(captured, operators, batch)
    setting = replace(setting, forwards_first=parts and forwards_first(captured, operators, batch))
    if setting.forwards_first and hints.schedule is not None and hints.schedule not in FORWARDS_FIRST:
        raise _backwards_wait(hints.schedule)
    experts, blocks = experts_of(captured, operators, hints.ep), len(forward_blocks(operators))
    check_inside_experts(operators, hints.etp or 1)
    length = 1 if captured.caches else workload.seq_len or 1  # a step of a generation has one token to split
    limits = Limits(batch, length, len(row), parts, stages, experts, blocks or None, setting.forwards_first)
    budget = min(float(cluster.device.memory_bytes), hints.memory_bytes or float("inf"))
    return Frame(setting, hints, hint_pins(captured, hints), limits, budget, known)


def _backwards_wait(schedule: str) -> HintError:
    return HintError(
        f"The hint schedule={schedule!r} cannot be kept: backwards need a sum over the forwards of all micro-batches.",
        expected=f"a schedule that runs all forwards first: {', '.join(sorted(FORWARDS_FIRST))}",
        found="a loss that is no sum over samples, as a balancing loss of experts",
        change="leave schedule out, or train without that loss (output_router_logits=False)",
    )


def experts_of(captured: Captured, operators: Operators, ep: int | None = None) -> int:
    """How many pieces all mixtures of a model can be cut into, as all divisors of it: 1 if it has no experts. HintError
    where the hint ``ep`` asks for another number."""
    counts = sorted({spec.shape[0] for spec in operators.specs.values() if spec.by_expert})
    found = math.gcd(*counts) if counts else 1
    if ep is not None and found % ep:
        many = f"mixtures of {', '.join(map(str, counts))} experts" if counts else "no experts that can be spread"
        raise HintError(
            f"The hint ep={ep} cannot be kept: every rank must have equally many experts.",
            expected=f"ep that divides {found}" if counts else "ep=1, or no hint",
            found=f"a model with {many}",
            change="choose a divisor, or leave ep out",
        )
    return found


def check_inside_experts(operators: Operators, etp: int) -> None:
    """HintError where a model has no experts, or matrices in them, that can be split over ``etp`` ranks each."""
    if etp == 1:
        return
    sizes = [{op.rule.sizes[f] for f in inside_experts(op)} for op in operators if op.is_heavy and op.rule.inward]
    if not sizes or any(all(size % etp for size in of_one) for of_one in sizes):
        raise HintError(
            f"The hint etp={etp} cannot be kept: every rank must have an equal part of every expert.",
            expected="etp that divides a dim of every matrix of the experts" if sizes else "etp=1, or no hint",
            found=f"matrices with dims of {', '.join(map(str, sorted(set().union(*sizes))))}" if sizes
            else "a model with no experts that can be split",
            change="choose another etp, or leave it out",
        )  # fmt: skip


class _Search:
    """One search: candidates by their estimates, solved until the best is known."""

    def __init__(
        self, model: nn.Module, frame: Frame, workload: Workload, seconds: float | None, line: Progress
    ) -> None:
        self.model, self.frame, self.workload, self.line = model, frame, workload, line
        self.estimates = Estimates(frame, line)
        self.solver = Solver(frame, self.estimates, seconds, line)

    def plan(self) -> Plan:
        """The plan; see `search`."""
        every: list[Estimate] = []
        for preferred in (True, False):
            more = self.estimates.all(preferred=preferred)
            every = sorted([*every, *more], key=lambda e: e.seconds)
            self.solver.run(more)
            if self.solver.found:
                return self._plan(self.solver.best(), every)
        return self._smallest(every)

    def _plan(self, found: Found, every: Sequence[Estimate]) -> Plan:
        """The plan that a solved candidate stands for."""
        c, best, setting = found.candidate, found.solved, found.setting
        bound = min([e.bound for e in every] + [best.step_time])
        captured, operators = setting.captured, setting.operators
        parameters = {p.name: _parameter_plan(p, setting, best.assignment) for p in captured.parameters}
        size = self.frame.limits.batch // data_degree(best.mesh) // c.micro_batches
        spread = expert_ranks(best.mesh)
        return Plan(
            model=type(self.model).__name__,
            structure=structure_hash((name, p.shape) for name, p in parameters.items()),
            degrees=_degrees(c, ranks_of_experts(operators, best.assignment)),
            zero=best.zero,
            zero_group_size=zero_group_size(best.mesh),
            expert_group_size=spread.dp if spread.dp > 1 else None,
            expert_context_size=spread.cp if spread.cp > 1 else None,
            forwards_first=setting.forwards_first and c.micro_batches > 1,
            micro_batch_size=max(1, size),
            num_micro_batches=c.micro_batches,
            schedule=c.schedule,
            stages=found.pipeline.stages if found.pipeline else (units(captured, operators),),
            recompute=setting.recompute,
            step_time=best.step_time,
            breakdown=best.breakdown,
            memory=best.memory,
            peaks=found.peaks,
            gap=max(0.0, best.step_time / bound - 1.0) if bound > 0 else 0.0,
            gap_space=gap_space(self.frame.limits.experts > 1),
            parameters=parameters,
            operators=operator_choices(operators, best.assignment),
            layers=describe_layers(captured, operators, best.assignment),
            collectives=best.collectives,
            replicated=describe_replicated(operators, best.assignment),
            alternatives=self._alternatives(found, every),
            cluster=self.frame.cluster.to_dict(),
            workload=self.workload.to_dict(),
            hints=self.frame.hints.to_dict(),
            flops_share=best.flops_share,
            prefill=found.prefill,
            flops=flops_by_dtype(operators),
            costs=layer_costs(Stages(setting, best.assignment, c.micro_batches, found.pipeline)),
            timing=best.timing,
        )

    def _alternatives(self, best: Found, every: Sequence[Estimate]) -> tuple[Alternative, ...]:
        """What lost: of other degrees the best that was solved, of the same degrees all, and of what does not fit the
        fastest."""
        found = [f for f in self.solver.found if f is not best]
        fastest = {f.candidate.degrees: f for f in sorted(found, key=lambda f: -f.solved.step_time)}
        shown = [f for f in found if f.candidate.degrees == best.candidate.degrees or fastest[f.candidate.degrees] is f]
        taken = _taken(_lost(best, best))  # by another way, as where the program decides by parameter what ZeRO splits
        known = [a for a in (_lost(best, f) for f in shown) if _taken(a) != taken]
        unfit: dict[object, Estimate] = {}
        for e in every:
            if e.memory > self.frame.budget and e.seconds < best.solved.step_time:
                unfit.setdefault(e.candidate.degrees, e)
        known += [_unfit(e, self.frame.budget) for e in list(unfit.values())[:UNFIT_SHOWN]]
        return tuple(sorted(known, key=lambda a: a.step_time))

    def _smallest(self, every: Sequence[Estimate]) -> Plan:
        """The plan that keeps the fewest bytes, if that fits, else InfeasibleError."""
        least = least_memory(self.estimates)
        if least is None:
            raise _cannot_be_kept(self.frame)
        if least.needed <= self.frame.budget:
            self.solver.found.append(least)
            return self._plan(least, every)
        free = None
        if self.frame.hints.to_dict().keys() - {"memory_limit"}:
            frame = replace(self.frame, hints=Hints(), pins=hint_pins(self.frame.setting.captured, Hints()))
            free = least_memory(Estimates(frame, self.line), self.frame.budget)
        raise _no_plan(self.frame, least, free)


def _parameter_plan(p: Parameter, setting: Setting, assignment: Assignment) -> ParameterPlan:
    kept = setting.zero.keeping(is_sharded(p, setting.operators, assignment), p.master is not None)
    used = used_axes(setting.operators, assignment, p.placeholder)
    return ParameterPlan(p.spec.shape, assignment.sources[p.placeholder], kept.copy, kept.gradient, used)


def _lost(best: Found, other: Found) -> Alternative:
    """Why a solved candidate lost."""
    fast, slow = best.solved, other.solved
    parts = [
        f"{kind} {_change(seconds, fast.breakdown[kind], fast.step_time)}"
        for kind, seconds in slow.breakdown.items()
        if abs(seconds - fast.breakdown[kind]) > 0.005 * fast.step_time
    ]
    reason = f"{slow.step_time / fast.step_time:.2f}x the time" + (f": {', '.join(parts)}" if parts else "")
    if slow.step_time < fast.step_time:
        reason += "; an ordinary loop cannot run it"
    degrees = _degrees(other.candidate, ranks_of_experts(other.setting.operators, slow.assignment))
    again = other.setting.recompute
    return _alternative(other.candidate, degrees, again, slow.zero, slow.step_time, other.needed, reason)


def _degrees(c: Candidate, experts: int | None) -> dict[str, int]:
    """The degrees of a candidate, with that of ``experts`` where there are any."""
    return c.degrees.table() | ({} if experts is None else {EXPERTS: experts})


def _taken(a: Alternative) -> tuple[object, ...]:
    """What an alternative decides."""
    return a.degrees, a.zero, a.zero_group_size, a.micro_batches, a.schedule, a.recompute


def _change(other: float, best: float, step_time: float) -> str:
    """How a part of a step differs: by a factor, or in seconds where the best one has next to nothing of it."""
    return f"{other / best:.2f}x" if best > 1e-3 * step_time else f"+{seconds_text(other - best)}"


def _unfit(e: Estimate, budget: float) -> Alternative:
    """A candidate that does not fit, by its estimate."""
    reason = f"needs about {(e.memory - budget) / 2**30:.1f} GiB more than fits"
    c, experts = e.candidate, math.prod(e.candidate.degrees.experts)
    degrees = _degrees(c, experts if experts > 1 else None)
    return _alternative(c, degrees, e.recompute, c.zero or 0, e.seconds, e.memory, reason)


def _alternative(
    c: Candidate, degrees: dict[str, int], recompute: str, zero: int, seconds: float, memory: float, reason: str
) -> Alternative:
    return Alternative(degrees, zero, c.group, c.micro_batches, c.schedule, recompute, seconds, int(memory), reason)


def _cannot_be_kept(frame: Frame) -> HintError:
    """Which hints leave no candidate."""
    hints, batch = frame.hints, frame.limits.batch
    size, ranks = hints.micro_batch_size, sorted({d.dp for d in all_degrees(frame.cluster, hints, frame.limits)})
    if size is not None and ranks and all(batch % (dp * size) for dp in ranks):
        return HintError(
            f"The hint micro_batch_size={size} does not divide the batch.",
            expected="a global batch of dp x micro_batch_size x a whole number of micro-batches",
            found=f"a global batch of {batch}, and dp of {', '.join(map(str, ranks))}",
            change="choose a micro_batch_size that divides global_batch / dp, or another batch",
        )
    if hints.ep is not None and not ranks and list(all_degrees(frame.cluster, replace(hints, ep=None), frame.limits)):
        over = [f"{axis}={n}" for axis in AXES if (n := getattr(hints, axis)) is not None]
        return HintError(
            f"The hint ep={hints.ep} fits no mesh that the other hints allow.",
            expected="ep that is a part of dp, times a part of cp, times all of tp or not",
            found=f"experts over {hints.ep} ranks of {_and(over) or f'{frame.cluster.size} in all'}",
            change="give another ep, or leave it or a degree out",
        )
    if hints.schedule is not None and hints.pp is not None and size is not None and ranks:
        chunks = ALL_SCHEDULES[hints.schedule] or min(able_chunks(hints.pp, frame.limits), default=2)
        stages = frame.limits.stages or hints.pp * chunks
        check_schedule(hints.schedule, hints.pp, stages, batch // (ranks[0] * size))
    return HintError(
        "the hints cannot be kept together",
        expected=f"a mesh pp x dp x cp x tp = {frame.cluster.size} on which hinted dims, batch and sequence divide",
        found=f"none for {hints.to_dict()}, a global batch of {batch}, sequences of {frame.limits.sequence} and "
        f"{frame.limits.units} units for stages",
        change="drop a hint, or give degrees that divide the hinted dims, batch and sequence",
    )


def _and(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def _no_plan(frame: Frame, least: Found, free: Found | None) -> InfeasibleError:
    """By how many bytes a budget is too small for the smallest plan, and for the smallest without hints."""

    def describe(found: Found) -> str:
        table = found.candidate.degrees.table()
        axes = ", ".join(f"{axis}={n}" for axis, n in table.items() if n > 1 or axis in ("dp", "tp"))
        when = "" if found.prefill is None or found.prefill.memory < found.needed else " while prompts are read"
        return f"{axes} with {math.ceil(found.needed)} bytes ({bytes_text(found.needed)}){when}"

    hints, budget = frame.hints, frame.budget
    source = "the hint memory_limit" if hints.memory_bytes == budget else f"one {frame.cluster.device.name}"
    nearest = f"{describe(free)} and zero={free.solved.zero}" if free is not None else ""
    if free is not None and free.needed <= budget:
        change = f"drop hints: {nearest} fits"
    else:
        enough = math.ceil(least.needed)
        change = f"raise the limit to {enough} bytes, take more devices, or a smaller batch or sequence"
        if free is not None and free.needed < least.needed:
            change += f"; without the other hints {nearest} is nearest to fitting"
    over = least.needed - budget
    return InfeasibleError(
        "no plan fits into the memory of a device",
        expected=f"at most {int(budget)} bytes a device ({source})",
        found=f"{math.ceil(over)} bytes ({bytes_text(over)}) too many: the smallest plan that the hints allow is "
        f"{describe(least)}",
        change=change,
    )
