"""nn.Module -> `Captured`: trace, read the descriptors, bring to normal form, find the blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar._compat import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    LazyGraphModule,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    pytree,
)
from autopar.capture.activations import Activations
from autopar.capture.blocks import label
from autopar.capture.gradients import cast_gradients
from autopar.capture.graph import Buffer, Captured, Output, Parameter, spec_of
from autopar.capture.hf_cache import kept
from autopar.capture.normalize import aten, drop_assertions, normalize, place_before_use, repeat_in_backward
from autopar.capture.random import refuse_random
from autopar.capture.repeats import Differs, Repeat, mark_repeats
from autopar.capture.replicate import put_copies
from autopar.capture.routed import mark_by_expert, mark_routed
from autopar.capture.trace import SEED, Traced, refuse_empty, trace
from autopar.errors import CaptureError
from autopar.garbage import collecting_later
from autopar.workload import Precision

__all__ = ["Captured", "capture", "refuse_empty"]

_log = logging.getLogger(__name__)


@collecting_later()
def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | None = None,
    whole: bool = False,
    precision: Precision | None = None,
    gradients: bool = True,
    activations: Activations | None = None,
) -> Captured:
    """Trace ``model(*args, **kwargs)`` forward and backward to one graph in normal form.

    The model is not changed and its weights are not touched; only shapes and dtypes of the batch matter (meta tensors
    are fine). Of blocks that are alike a few are traced and copied; ``whole`` traces them all, with the same graph as
    the result. With ``precision`` parameters and inputs of floating point are used in its dtype. Without ``gradients``
    the graph has no backward. ``activations`` are the hint of that name (`capture.activations`), which all blocks are
    traced for. Raises CaptureError, naming module, operator and source line, HintError, and InputError for an empty
    batch.
    """
    kwargs = dict(kwargs or {})
    repeats: list[Repeat] = []
    param_dtype = None if precision is None else precision.param_dtype
    if not whole and not activations:  # a pattern may mean some of the blocks
        try:
            traced = trace(
                model,
                args,
                kwargs,
                training=training,
                prepare=lambda clone: repeats.extend(mark_repeats(clone)),
                param_dtype=param_dtype,
                gradients=gradients,
            )
            return _with_masters(_read(traced, repeats, precision), model, precision)
        except (Differs, CaptureError) as error:
            if not repeats:
                raise
            _log.debug("%s is traced whole: %s", type(model).__name__, error)
    more: dict[str, Any] = {"param_dtype": param_dtype, "gradients": gradients, "activations": activations}
    traced = trace(model, args, kwargs, training=training, **more)
    return _with_masters(_read(traced, (), precision), model, precision)


def _with_masters(captured: Captured, model: nn.Module, precision: Precision | None) -> Captured:
    """Note the dtype in which a parameter rests where that is not the one in which it is used."""
    if precision is None:
        return captured
    own = {p.name: model.get_parameter(p.name).dtype for p in captured.parameters}
    masters = (None if own[p.name] == p.spec.dtype else own[p.name] for p in captured.parameters)
    pairs = zip(captured.parameters, masters, strict=True)
    return replace(captured, parameters=tuple(replace(p, master=master) for p, master in pairs))


def _read(traced: Traced, repeats: Sequence[Repeat], precision: Precision | None) -> Captured:
    """The raw graph in normal form, its markers replaced by blocks. Raises Differs and CaptureError."""
    graph = traced.module.graph
    constants = _lift_constants(traced.module)
    _add_parameters(traced, {name: p for repeat in repeats for name, p in repeat.parameters.items()})
    inputs = _inputs(traced, graph, {c.placeholder for c in constants})
    parameters = _parameters(traced, graph, inputs)
    if traced.frozen:
        parameters = tuple(replace(p, gradient=None) for p in parameters)
    _order_outputs(traced, graph, parameters)
    if traced.frozen:
        _drop_tangents(graph, inputs["tangents"])
    drop_assertions(graph)
    place_before_use(graph, [p.placeholder for p in parameters])
    normalize(graph)
    held = [Buffer(b.name.removeprefix(traced.prefix), b.placeholder) for b in inputs["buffers"] if b.name != SEED]
    buffers = tuple(held + constants)
    gradients = {p.name: node for p, node in zip(parameters, _gradient_nodes(graph, parameters), strict=True)}
    parameters = tuple(Parameter(p.name, p.aliases, p.spec, p.placeholder, gradients[p.name]) for p in parameters)
    if precision is not None:
        parameters = cast_gradients(graph, parameters, precision.reduce_dtype)
    label(graph, [(p.placeholder, p.name) for p in parameters])
    refuse_random(graph)
    mark_routed(graph)
    repeat_in_backward(graph, {*(p.placeholder for p in parameters), *(b.placeholder for b in buffers)})
    parameters, blocks = put_copies(graph, repeats, parameters, buffers)
    mark_by_expert(graph)
    outputs = _outputs(graph, inputs)
    caches = tuple(kept(_filled_in(traced.input_spec, traced.input_constants, inputs["plain"])))
    outputs, constants_out = _with_caches(traced, outputs, bool(caches), graph)
    seed = next((b for b in inputs["buffers"] if b.name == SEED and b.placeholder.users), None)
    return Captured(
        LazyGraphModule(nn.Module(), graph),  # the text of a deep model's graph takes long, and is rarely asked for
        parameters,
        buffers,
        inputs["plain"],
        traced.input_spec,
        outputs,
        traced.output_spec,
        constants_out,
        seed.placeholder if seed else None,
        blocks,
        caches,
    )


def _filled_in(spec: pytree.TreeSpec, constants: Mapping[int, Any], tensors: Sequence[Any]) -> Any:
    """The structure of ``spec`` with ``constants`` by place and ``tensors`` in the other places."""
    others = iter(tensors)
    leaves = [constants[i] if i in constants else next(others) for i in range(spec.num_leaves)]
    return pytree.tree_unflatten(leaves, spec)


def _with_caches(
    traced: Traced, outputs: tuple[Output, ...], written: bool, graph: fx.Graph
) -> tuple[tuple[Output, ...], tuple[tuple[int, Any], ...]]:
    """``outputs`` with those marked that are keys and values of a cache, and the constants beside them. What is
    ``written`` over a cache that the graph is given is no output, and None in the place of one."""
    constants, count = dict(traced.output_constants), traced.output_spec.num_leaves
    places = dict(zip((i for i in range(count) if i not in constants), outputs, strict=False))
    caches = {o.node for o in kept(pytree.tree_unflatten([places.get(i) for i in range(count)], traced.output_spec))}
    if not written:
        return tuple(replace(o, cached=o.node in caches) for o in outputs), traced.output_constants
    left = tuple(o for o in outputs if o.node not in caches)
    graph.output_node().args = (tuple(o.node for o in left),)
    nothing = {i: None for i, o in places.items() if o.node in caches}
    return left, tuple(sorted({**constants, **nothing}.items()))


def _lift_constants(module: fx.GraphModule) -> list[Buffer]:
    """Make inputs of the constants that the forward creates (``torch.tensor(...)``), so that a graph holds no data."""
    first = next(iter(module.graph.nodes))
    found: dict[str, Buffer] = {}
    for node in list(module.graph.find_nodes(op="get_attr")):
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"the forward hands {', '.join(str(user.target) for user in node.users)} what is no tensor",
                expected="tensors and plain numbers as arguments of operators",
                found=f"{type(value).__name__}",
                change="leave it out (random numbers are drawn by model.seed, the same however the model is split)",
            )
        if node.target not in found:
            with module.graph.inserting_before(first):
                placeholder = module.graph.placeholder(node.target.lstrip("_"))
            placeholder.meta = {"val": torch.empty_like(value, device="meta")}
            found[node.target] = Buffer(node.target, placeholder, value)
        node.replace_all_uses_with(found[node.target].placeholder)
        module.graph.erase_node(node)
    return list(found.values())


def _add_parameters(traced: Traced, missing: Mapping[str, nn.Parameter]) -> None:
    """Add placeholders for the parameters of blocks that were not traced, each where a whole trace would have it."""
    graph = traced.module.graph
    descs = {node: node.meta.get("desc") for node in graph.find_nodes(op="placeholder")}
    present = {d.target: node for node, d in descs.items() if isinstance(d, ParamAOTInput)}
    last = None
    for name in traced.parameter_aliases:
        target = traced.prefix + name
        if name in missing:
            assert last is not None  # the first block of a run is traced
            with graph.inserting_after(last):
                last = graph.placeholder("parameter_" + name.replace(".", "_"))
            last.meta = {"val": missing[name], "desc": ParamAOTInput(target)}
        else:
            last = present[target]


def _inputs(traced: Traced, graph: fx.Graph, constants: set[fx.Node]) -> dict[str, Any]:
    """The placeholders by what they are."""
    found: dict[str, Any] = {"parameters": {}, "buffers": [], "plain": {}, "tangents": {}}
    for node in graph.find_nodes(op="placeholder"):
        if node in constants:
            continue
        desc = node.meta["desc"]
        if isinstance(desc, ParamAOTInput):
            found["parameters"][desc.target.removeprefix(traced.prefix)] = node
        elif isinstance(desc, BufferAOTInput):
            found["buffers"].append(Buffer(desc.target, node))
        elif isinstance(desc, PlainAOTInput):
            found["plain"][desc.idx] = node
        elif isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
            found["tangents"][desc.output.idx] = node
        else:
            raise CaptureError(
                "the traced graph has an input that is not understood",
                expected="parameters, buffers, inputs and tangents",
                found=str(desc),
                change="avoid inputs that alias one another",
            )
    found["plain"] = tuple(node for _, node in sorted(found["plain"].items()))
    return found


def _returned(graph: fx.Graph) -> list[Any]:
    """What the graph returns: nodes, and None where an input gets no gradient."""
    returned: Any = graph.output_node().args[0]
    return list(returned)


def _parameters(traced: Traced, graph: fx.Graph, inputs: dict[str, Any]) -> tuple[Parameter, ...]:
    """One `Parameter` for all names of a tied weight: its uses are joined here, its gradients summed."""
    gradients: dict[str, fx.Node] = {}
    for node, desc in zip(_returned(graph), graph.output_node().meta["desc"], strict=True):
        if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput) and node is not None:
            gradients[desc.grad_of.target.removeprefix(traced.prefix)] = node
    names: dict[str, list[str]] = {}
    for name, first in traced.parameter_aliases.items():
        names.setdefault(first, []).append(name)
    found = []
    for first, aliases in names.items():
        present = [a for a in aliases if a in inputs["parameters"]]
        if not present:
            continue
        placeholder = inputs["parameters"][present[0]]
        for other in present[1:]:
            inputs["parameters"][other].replace_all_uses_with(placeholder)
            graph.erase_node(inputs["parameters"][other])
        total = _sum(graph, [gradients[a] for a in present if a in gradients])
        spec = spec_of(placeholder)
        assert spec is not None
        found.append(Parameter(first, tuple(a for a in aliases if a != first), spec, placeholder, total))
    if all(p.gradient is None for p in found):
        raise CaptureError(
            "no parameter gets a gradient",
            expected="a loss or an output that depends on the parameters",
            found="a forward that detaches them all",
            change="remove the detach or no_grad",
        )
    return tuple(found)


def _sum(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node | None:
    if not nodes:
        return None
    total = nodes[0]
    with graph.inserting_before(graph.output_node()):
        for node in nodes[1:]:
            value = total.meta["val"]
            total = graph.call_function(aten.add.Tensor, (total, node))
            total.meta = {"val": value, "partitioner_tag": "is_backward"}
    return total


def _drop_tangents(graph: fx.Graph, tangents: dict[int, fx.Node]) -> None:
    """Remove the backward of a graph that returns no gradients."""
    graph.eliminate_dead_code()
    for node in tangents.values():
        graph.erase_node(node)
    tangents.clear()


def _order_outputs(traced: Traced, graph: fx.Graph, parameters: tuple[Parameter, ...]) -> None:
    """The graph's outputs become: what the model returns, then the new values of buffers that its forward changes, then
    one gradient a parameter that has one. ``meta["plain"]`` and ``meta["updated"]`` of the output node say where."""
    output = graph.output_node()
    plain, updates = [], {}
    for node, desc in zip(_returned(graph), output.meta["desc"], strict=True):
        if isinstance(desc, PlainAOTOutput):
            plain.append(node)
        elif isinstance(desc, InputMutationAOTOutput) and isinstance(desc.mutated_input, BufferAOTInput):
            updates[desc.mutated_input.target.removeprefix(traced.prefix)] = node
        elif not isinstance(desc, GradAOTOutput) and node is not None:
            raise CaptureError(
                "the traced graph has an output that is not understood",
                expected="results, changed buffers and gradients",
                found=str(desc),
                change="do not change inputs or parameters in the forward, nor return views of one another",
            )
    output.args = ((*plain, *updates.values(), *(p.gradient for p in parameters if p.gradient is not None)),)
    output.meta["plain"], output.meta["updated"] = len(plain) + len(updates), tuple(updates)


def _gradient_nodes(graph: fx.Graph, parameters: tuple[Parameter, ...]) -> list[fx.Node | None]:
    """The gradients after the graph was rewritten, from the outputs' order."""
    rest = iter(_returned(graph)[graph.output_node().meta["plain"] :])
    return [next(rest) if p.gradient is not None else None for p in parameters]


def _outputs(graph: fx.Graph, inputs: dict[str, Any]) -> tuple[Output, ...]:
    output = graph.output_node()
    nodes, updated = _returned(graph)[: output.meta["plain"]], output.meta["updated"]
    returned = len(nodes) - len(updated)
    results = [Output(node, inputs["tangents"].get(i)) for i, node in enumerate(nodes[:returned])]
    return (*results, *(Output(n, buffer=b) for n, b in zip(nodes[returned:], updated, strict=True)))


def batch_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor leaves of a batch, in the order of `Captured.inputs`."""
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
