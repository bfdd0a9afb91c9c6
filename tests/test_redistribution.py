"""What redistributions cost is what runs: every pair of layouts on a 2 x 2 mesh, and the collectives of whole plans."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from models import (
    BERT,
    CASES,
    FUSED,
    GPT2,
    LLAMA,
    PERCEPTRON,
    SMOLLM2,
    Case,
    captured_case,
    compared,
    plan_captured,
)
from torch import Tensor, fx

from autopar import Hints, Workload
from autopar.cost_model.communication import wire_bytes
from autopar.passes.collectives import aten, emit_step
from autopar.plan import Plan
from autopar.runtime.simulate import Traffic, run_ranks
from autopar.runtime.verify import VerifyReport
from autopar.sharding import redistribute
from autopar.sharding.layout import Layout, Mesh
from autopar.sharding.redistribute import Step, redistribution, whole_elements
from autopar.specialize import specialize

MESH = Mesh((("dp", 2), ("tp", 2)))
SHAPES = ((8, 4), (4, 4, 4), (8,), ())
DTYPE = torch.float64
#: Steps in which nothing is sent.
LOCAL = ("chunk", "mask")


def every_layout(shape: tuple[int, ...]) -> list[Layout]:
    """Every layout on the mesh whose pieces are equal: per axis replicated, partial (sum or max, never both kinds,
    which do not commute) or split along a dim, and a dim that both axes split in both orders."""
    ndim = len(shape)
    options: list[int | str | None] = [None, "sum", "max", *range(ndim)]
    found = []
    for choice in itertools.product(options, repeat=2):
        by_axis = dict(zip(MESH.names, choice, strict=True))
        split = {axis: d for axis, d in by_axis.items() if isinstance(d, int)}
        partial = tuple(sorted((axis, op) for axis, op in by_axis.items() if isinstance(op, str)))
        if len({op for _, op in partial}) > 1:
            continue
        both = len(split) == 2 and len(set(split.values())) == 1
        for order in (MESH.names, MESH.names[::-1]) if both else (MESH.names,):
            layout = Layout(Layout.shard(ndim, split, order).dims, partial)
            if layout.divides(MESH, shape):
                found.append(layout)
    return found


def test_paths_do_not_depend_on_what_was_sought_before() -> None:
    """Moves are shared by shapes and meshes, and a search goes on where the last one from the same layout ended: what
    it finds is what it finds with nothing known. Shapes that an axis does not divide have other ways, or none."""
    meshes = (Mesh((("dp", 2), ("cp", 2), ("tp", 2))), Mesh((("dp", 4), ("cp", 2), ("tp", 3))))
    dims = [(), ("dp",), ("tp",), ("dp", "cp"), ("cp", "tp")]
    layouts = [Layout(pair) for pair in itertools.product(dims, repeat=2) if not {*pair[0]} & {*pair[1]}]
    layouts += [Layout((a, ()), (("cp", "sum"),)) for a in dims[:3]]
    asked = [(a, b, mesh, shape) for a, b in itertools.product(layouts, repeat=2) for mesh in meshes
             for shape in ((48, 24), (16, 6)) if a.divides(mesh, shape) and b.divides(mesh, shape)][::7]  # fmt: skip
    together = [redistribution(*question, 4) for question in asked]
    for question, found in zip(asked, together, strict=True):
        for known in (redistribute._ways, redistribute._charges, redistribute._paths_from):
            known.cache_clear()
        assert redistribution(*question, 4) == found
    assert len(asked) > 100 and max(len(found) for found in together if found is not None) >= 3
    whole, pieces = Layout.replicated(2), Layout((("tp",), ()))
    assert redistribution(whole, pieces, meshes[1], (16, 6), 4) is None
    assert redistribution(whole, pieces, meshes[1], (48, 24), 4) is not None


def can_reach(source: Layout, target: Layout) -> bool:
    """What must be possible: everything but making an outstanding maximum. A sum can be owed again: by all replicas but
    one at zero."""
    return all(pair in source.partial for pair in target.partial if pair[1] == "max")


def whole_tensor(shape: tuple[int, ...]) -> Tensor:
    """Distinct whole numbers, so that sums of pieces are exact and a misplaced element shows."""
    return torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(7)).to(DTYPE).view(shape)


def scatter(whole: Tensor, layout: Layout) -> list[Tensor]:
    """One piece a rank; where they are owed a reduction, pieces that give the whole only when it is done."""
    pieces = [layout.local_slice(MESH, whole, rank).clone() for rank in range(MESH.size)]
    for rank, piece in enumerate(pieces):
        coordinates = dict(zip(MESH.names, MESH.coordinates(rank), strict=True))
        seed = 11
        for axis, op in layout.partial:
            generator = torch.Generator().manual_seed(seed)  # the same for the ranks that share this value so far
            noise = torch.randint(1, 50, whole.shape, generator=generator).to(DTYPE)
            second = coordinates[axis] == 1
            if op == "sum":  # x + noise and -noise
                mine = layout.local_slice(MESH, noise, rank)
                piece.copy_(-mine if second else piece + mine)
            else:  # about half of the largest elements lie on either rank
                lower = (torch.rand(whole.shape, generator=generator) < 0.5) != second
                piece -= layout.local_slice(MESH, noise * lower, rank)
            seed = 2 * seed + second
    return pieces


def owed(pieces: list[Tensor], layout: Layout) -> list[Tensor]:
    """What every rank would hold if the reductions still outstanding in ``layout`` were done."""
    for axis, op in layout.partial:
        at, stride = MESH.names.index(axis), MESH.stride(axis)
        done = []
        for rank in range(MESH.size):
            first = rank - MESH.coordinates(rank)[at] * stride
            pair = torch.stack([pieces[first], pieces[first + stride]])
            done.append(pair.sum(0) if op == "sum" else pair.amax(0))
        pieces = done
    return pieces


def emitted(steps: tuple[Step, ...], shape: tuple[int, ...]) -> fx.GraphModule:
    """A graph (tensor, coordinates) -> (tensor,) that takes the steps."""
    graph = fx.Graph()
    x, coordinates = graph.placeholder("x"), graph.placeholder("coordinates")

    def emit(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    def coordinate(axis: str) -> fx.Node:
        i = MESH.names.index(axis)
        return emit(aten.slice.Tensor, coordinates, 0, i, i + 1)

    for step in steps:
        x = emit_step(emit, x, step, MESH, shape, coordinate)
    graph.output((x,))
    return fx.GraphModule(torch.nn.Module(), graph)


def priced(steps: tuple[Step, ...], shape: tuple[int, ...]) -> tuple[Counter[Any], Counter[Any]]:
    """Number and bytes of collectives by kind and axis, as the solver prices them."""
    count: Counter[Any] = Counter()
    nbytes: Counter[Any] = Counter()
    for step in steps:
        if step.kind not in LOCAL:
            count[step.kind, step.axis] += 1
            nbytes[step.kind, step.axis] += whole_elements(step, MESH, shape) * DTYPE.itemsize
    return count, nbytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_layouts(shape: tuple[int, ...]) -> None:
    """From every layout to every other that can be reached: each rank ends with its piece of the whole tensor, and the
    collectives that ran are those priced, in number and bytes."""
    layouts = every_layout(shape)
    whole = whole_tensor(shape)
    pairs = moved = 0
    for source, target in itertools.product(layouts, repeat=2):
        steps = redistribution(source, target, MESH, shape, DTYPE.itemsize)
        assert (steps is not None) == can_reach(source, target), f"{source} -> {target}"
        if steps is None:
            continue
        traffic = Traffic()
        inputs = [[p, torch.tensor(MESH.coordinates(r))] for r, p in enumerate(scatter(whole, source))]
        results = [out[0] for out in run_ranks(emitted(steps, shape), inputs, MESH, traffic)]
        for rank, result in enumerate(owed(results, target)):
            assert torch.equal(result, target.local_slice(MESH, whole, rank)), f"{source} -> {target}, rank {rank}"
        assert (traffic.count, traffic.bytes) == priced(steps, shape), f"{source} -> {target}"
        pairs, moved = pairs + 1, moved + bool(traffic.count)
    assert (len(layouts), pairs) == EXPECTED[shape]
    assert moved > pairs // 2, "a mistake in the enumeration must not pass unseen"


#: Layouts, and pairs of them that can be reached, counted by hand: with d dims and 2 axes there are (1 + d)^2 + d
#: layouts without reductions, 2 (1 + d) with one outstanding of each kind, and 1 with two. There is a way from all into
#: all that owe no maximum, and into one that owes it on axes A from those that owe it on at least A.
EXPECTED = {}
for _shape in SHAPES:
    _d = len(_shape)
    _plain, _one, _two = (1 + _d) ** 2 + _d, 1 + _d, 1
    _layouts = _plain + 2 * (2 * _one + _two)
    EXPECTED[_shape] = (_layouts, (_plain + 2 * _one + _two) * _layouts + 2 * _one * (_one + _two) + _two * _two)


# -- by hand ---------------------------------------------------------------------------------------------------------


def layout(*dims: str, **partial: str) -> Layout:
    """``layout("dp tp", "")``: the axes of every dim, outermost first."""
    return Layout(tuple(tuple(d.split()) for d in dims), tuple(sorted(partial.items())))


#: Moves of a float32 [8, 4] tensor, with the elements of the whole tensor X of the one collective worked out by hand,
#: and the bytes that a rank sends: 1/2 X for a gather or a scatter, X for an all-reduce (both on 2 ranks), and half of
#: its own X/2 for an all-to-all.
BY_HAND = {
    "gather-rows": (layout("dp", ""), layout("", ""), "all_gather", "dp", 8 * 4, 64),
    "gather-rows-of-columns": (layout("dp", "tp"), layout("", "tp"), "all_gather", "dp", 8 * 2, 32),
    "gather-inner": (layout("dp tp", ""), layout("dp", ""), "all_gather", "tp", 4 * 4, 32),
    "reduce": (layout("", "", dp="sum"), layout("", ""), "all_reduce", "dp", 8 * 4, 128),
    "reduce-columns": (layout("", "tp", dp="sum"), layout("", "tp"), "all_reduce", "dp", 8 * 2, 64),
    "reduce-max": (layout("tp", "", dp="max"), layout("tp", ""), "all_reduce", "dp", 4 * 4, 64),
    "scatter": (layout("", "", tp="sum"), layout("", "tp"), "reduce_scatter", "tp", 8 * 4, 64),
    "scatter-of-rows": (layout("dp", "", tp="sum"), layout("dp", "tp"), "reduce_scatter", "tp", 4 * 4, 32),
    "exchange": (layout("tp", ""), layout("", "tp"), "all_to_all", "tp", 8 * 4, 32),
    "exchange-within": (layout("dp tp", ""), layout("dp", "tp"), "all_to_all", "tp", 4 * 4, 16),
}


@pytest.mark.parametrize(("source", "target", "kind", "axis", "elements", "sent"), BY_HAND.values(), ids=BY_HAND)
def test_bytes_by_hand(source: Layout, target: Layout, kind: str, axis: str, elements: int, sent: int) -> None:
    """`whole_elements` and `wire_bytes` of one collective of each kind, against numbers worked out on paper; and what a
    rank sends, from the pieces that it really holds."""
    shape, itemsize, n = (8, 4), 4, 2
    (step,) = redistribution(source, target, MESH, shape, itemsize) or ()
    assert (step.kind, step.axis) == (kind, axis)
    assert whole_elements(step, MESH, shape) == elements
    assert wire_bytes(kind, elements * itemsize, n) == sent
    held = torch.Size(source.local_shape(MESH, shape)).numel() * itemsize
    by_piece = {"all_gather": held, "reduce_scatter": held // 2, "all_reduce": held, "all_to_all": held // 2}
    assert by_piece[kind] == sent


def test_wire_bytes_of_four_ranks() -> None:
    """On 4 ranks with X = 1200 bytes a ring sends 3 pieces of 300 to gather or to scatter, 6 to reduce on all, and an
    all-to-all 3 of the 4 parts of a rank's own 300."""
    sent = {kind: wire_bytes(kind, 1200, 4) for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")}
    assert sent == {"all_gather": 900, "reduce_scatter": 900, "all_reduce": 1800, "all_to_all": 225}


def test_an_outer_axis_cannot_leave_alone() -> None:
    """Where dp splits a dim outside tp, taking dp away moves both: at least two collectives, never the single gather of
    a naive price (DESIGN section 6), and the pieces stay right (`test_every_pair_of_layouts`)."""
    steps = redistribution(layout("dp tp", ""), layout("tp", ""), MESH, (8, 4), 4)
    assert steps is not None
    assert sum(step.kind not in LOCAL for step in steps) >= 2
    (inner,) = redistribution(layout("tp dp", ""), layout("tp", ""), MESH, (8, 4), 4) or ()
    assert (inner.kind, inner.axis) == ("all_gather", "dp")


# -- whole plans -----------------------------------------------------------------------------------------------------

PLANS: dict[str, tuple[int, Hints]] = {
    "free-4": (4, Hints(pp=1)),  # what stages send is counted in test_pipeline.py
    "tp4": (4, Hints(tp=4)),
    "dp4": (4, Hints(dp=4, zero=0)),
    "dp2-tp2": (4, Hints(dp=2, tp=2, zero=0)),
    "zero3-dp4": (4, Hints(dp=4, zero=3)),
    "zero3-dp2-tp2": (4, Hints(dp=2, tp=2, zero=3)),
    "zero3-dp2-tp4": (8, Hints(dp=2, tp=4, zero=3)),
}


@functools.cache
def planned(case: Case, name: str, dtype: torch.dtype = torch.float32) -> Plan:
    """The plan of a case under forced hints."""
    ranks, hints = PLANS[name]
    captured, workload = captured_case(case, dtype), Workload(optimizer="sgd")
    return plan_captured(*case.make(dtype), captured, f"cpu:1x{ranks}", hints, workload)


def simulated(case: Case, plan: Plan, dtype: torch.dtype = torch.float32) -> VerifyReport:
    """All ranks of ``plan``."""
    return compared(*case.make(dtype), plan, captured_case(case, dtype))


def priced_by_plan(plan: Plan) -> tuple[dict[Any, int], dict[Any, int]]:
    """Number and bytes of a plan's collectives by kind and axis, over all purposes."""
    count: Counter[Any] = Counter()
    nbytes: Counter[Any] = Counter()
    for c in plan.collectives:
        count[c.kind, c.axis] += c.count
        nbytes[c.kind, c.axis] += c.bytes
    return dict(count), dict(nbytes)


def _plan_parameters() -> list[Any]:
    every, some = (LLAMA, FUSED, PERCEPTRON), ("free-4", "tp4", "zero3-dp2-tp2")
    return [
        pytest.param(
            case,
            name,
            id=f"{case.name}-{name}",
            marks=() if case in every or (case is BERT and name in some) else pytest.mark.slow,
        )
        for case, name in itertools.product(CASES, PLANS)
    ]


@pytest.mark.parametrize(("case", "name"), _plan_parameters())
def test_collectives_of_a_plan(case: Case, name: str) -> None:
    """The collectives that run in one step are those that the plan names, in number and bytes, by kind and axis."""
    plan = planned(case, name)
    report = simulated(case, plan)
    assert report.ok, report
    assert (dict(report.traffic.count), dict(report.traffic.bytes)) == priced_by_plan(plan)
    assert any(plan.collectives)
    for c in plan.collectives:
        assert c.wire_bytes == pytest.approx(float(wire_bytes(c.kind, c.bytes, plan.mesh.degree(c.axis))), abs=c.count)


@pytest.mark.parametrize("case", [LLAMA, GPT2], ids=lambda case: case.name)
def test_collectives_of_a_bfloat16_plan(case: Case) -> None:
    """As above where values are cast, so that bytes an element are not the same everywhere."""
    plan = planned(case, "zero3-dp2-tp2", torch.bfloat16)
    report = simulated(case, plan, torch.bfloat16)
    assert (dict(report.traffic.count), dict(report.traffic.bytes)) == priced_by_plan(plan)


@pytest.mark.parametrize("name", ["free-4", "dp4", "zero3-dp2-tp2"])
@pytest.mark.parametrize("case", [LLAMA, SMOLLM2, PERCEPTRON], ids=lambda case: case.name)
def test_a_plan_is_carried_whole(case: Case, name: str) -> None:
    """The program made from a plan stores every parameter as the plan says, and ``zero`` is 3 only where one of them
    rests split over dp: outputs that lie split over dp do not count."""
    plan = planned(case, name)
    model, batch = case.make()
    s = specialize(model, plan, (), batch, captured=captured_case(case))
    assert {p.name: s.assignment.sources[p.placeholder] for p in s.captured.parameters} == {
        n: p.storage for n, p in plan.parameters.items()
    }
    assert plan.zero == (3 if any("dp" in p.storage.split_axes for p in plan.parameters.values()) else 0)
    if (asked := PLANS[name][1].zero) is not None:
        assert plan.zero == asked
