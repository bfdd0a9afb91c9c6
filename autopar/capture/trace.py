"""nn.Module -> joint ATen graph, by AOTAutograd on a fake copy of the module (DESIGN section 4).

The model itself is never touched: it is copied with every tensor replaced by a fake one of the same strides, so a copy
costs no memory and the copy can be prepared for tracing at will.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn

import autopar
from autopar import ops
from autopar._compat import FakeTensorMode, aot_export_joint_with_descriptors, compiling, fake_like, pytree, unvalidated
from autopar.capture import hf
from autopar.capture.activations import Activations, constrain_results
from autopar.capture.decompositions import decomposition_table
from autopar.capture.hf_adapters import core
from autopar.capture.layers import SplittableLayers
from autopar.capture.loops import RoutedLoops
from autopar.capture.random import refuse_constants
from autopar.capture.selected import NotRouted
from autopar.errors import CaptureError, HintError, InputError
from autopar.ops.constrain import kept_in_graph

#: Name of the buffer that carries the dropout seed through the trace.
SEED = "autopar_seed"


class _Flat(nn.Module):
    """Runs a model on the flattened batch and returns the flattened tensors of its result.

    With a scalar ``loss`` among the outputs only that one carries a gradient: the others are detached, so that no
    gradient of the logits is traced which nobody will ask for.
    """

    def __init__(self, model: nn.Module, spec: pytree.TreeSpec, constants: dict[int, Any], seed: Tensor) -> None:
        super().__init__()
        self.model = model
        self.spec, self.constants = spec, constants
        self.register_buffer(SEED, seed, persistent=False)
        self.output_spec: pytree.TreeSpec | None = None
        self.output_constants: tuple[tuple[int, Any], ...] = ()
        self.streams = 0

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [self.constants[i] if i in self.constants else next(given) for i in range(self.spec.num_leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        held = _held(self.model)
        with ops.counter_draws(getattr(self, SEED)) as mode, SplittableLayers(), RoutedLoops():
            result = self.model(*args, **kwargs)
        self.streams = mode.streams
        _refuse_rebinding(held, _held(self.model))
        loss = _loss_of(result)
        flat, self.output_spec = pytree.tree_flatten(result)
        self.output_constants = tuple((i, leaf) for i, leaf in enumerate(flat) if not isinstance(leaf, Tensor))
        kept = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        return tuple(leaf if loss is None or leaf is loss else leaf.detach() for leaf in kept)


def _held(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model by name, tied ones under each of their names."""
    return dict(model.named_buffers(remove_duplicate=False))


def _refuse_rebinding(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """CaptureError if a forward put other tensors in the place of buffers: the trace would forget them silently, where
    changes in place are seen."""
    rebound = [name for name, tensor in after.items() if before.get(name) is not tensor]
    if rebound:
        raise CaptureError(
            f"the forward replaces {rebound[0]} by another tensor",
            expected="buffers that are changed in place, or not at all",
            found="an assignment to " + ", ".join(rebound),
            change="change it in place (.copy_(), .add_(), ...) in place of an assignment",
        )


def _plain(model: nn.Module) -> dict[str, Any]:
    """The numbers, flags and texts that modules keep as attributes."""
    return {
        f"{name}.{attribute}".lstrip("."): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, (int, float, str))
    }


def _warn_of_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Say which attributes a forward changed: a graph has their values of its trace, whatever becomes of them later."""
    changed = [name for name, value in after.items() if before.get(name, value) != value]
    if changed:
        warnings.warn(
            f"the forward changes {', '.join(changed)} of the model: the sharded program does not, and computes in "
            "every step with the value that it had while tracing. If its result depends on it, keep it in a buffer "
            "that is changed in place, or pass it in as an input",
            UserWarning,
            stacklevel=2,
        )


def _loss_of(result: Any) -> Tensor | None:
    """The scalar loss among a model's outputs, if it is named so."""
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


@dataclass
class Traced:
    """The raw joint graph and what is needed to read it. ``frozen`` models have gradients in it that nobody wants."""

    module: fx.GraphModule
    input_spec: pytree.TreeSpec
    input_constants: dict[int, Any]
    output_spec: pytree.TreeSpec
    output_constants: tuple[tuple[int, Any], ...]
    parameter_aliases: dict[str, str]
    streams: int
    frozen: bool
    prefix: str = field(default="model.")


def compute_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter or an input is used: ``dtype`` for floating point ones, if it is given."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _fake_memo(model: nn.Module, mode: Any, param_dtype: torch.dtype | None) -> dict[int, Tensor]:
    """One fake tensor for every tensor that the model holds, keyed by id, as deepcopy's memo takes them; parameters in
    ``param_dtype``."""
    memo: dict[int, Tensor] = {}

    def add(tensor: Tensor) -> None:
        if id(tensor) in memo:
            return
        dtype = compute_dtype(tensor, param_dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype
        memo[id(tensor)] = fake_like(tensor, dtype, mode)

    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            if value is not None:
                add(value)
        for name, value in vars(module).items():
            if not name.startswith("_"):
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        add(leaf)
    return memo


def _clone(model: nn.Module, mode: Any, param_dtype: torch.dtype | None) -> nn.Module:
    try:
        return copy.deepcopy(model, _fake_memo(model, mode, param_dtype))
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for tracing",
            expected="a module that copy.deepcopy accepts",
            found=f"{type(error).__name__}: {error}",
            change="keep handles, locks and open files out of the module",
        ) from error


def _attributes_to_buffers(model: nn.Module) -> None:
    """Make tensors kept as plain attributes buffers of the (cloned) model: AOTAutograd makes inputs of those only."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)


def _annotate(model: nn.Module) -> None:
    """Let every node know its module: FX keeps the annotation on forward and backward nodes."""

    def wrap(module: nn.Module, name: str) -> None:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with fx_traceback.annotate({"module": name}):
                try:
                    return original(*args, **kwargs)
                except Exception as error:
                    if not hasattr(error, "autopar_module"):  # the innermost module is the one to name
                        error.autopar_module = (name, type(module).__name__)  # type: ignore[attr-defined]
                    raise

        module.forward = forward

    for name, module in model.named_modules():
        wrap(module, name)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every parameter name -> the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


@contextlib.contextmanager
def _trace_context(is_hf: bool, may_pack: bool) -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(compiling())
        stack.enter_context(unvalidated())
        stack.enter_context(kept_in_graph())
        if is_hf:
            stack.enter_context(hf.tracing(may_pack))
        yield stack


def _failure(model: nn.Module, error: BaseException) -> CaptureError:
    """Name the module, the operator and the source line of a failed trace."""
    frames = traceback.extract_tb(error.__traceback__)
    hidden = ("/torch/", str(Path(autopar.__file__).parent), "/contextlib.py")
    mine = [f for f in frames if not any(part in f.filename for part in hidden)]
    name, kind = getattr(error, "autopar_module", ("", type(model).__name__))
    place = f"module {name} ({kind})" if name else kind
    if mine:
        place += f" at {mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}"
    if isinstance(error, NotRouted):
        return CaptureError(
            f"{type(model).__name__} cannot be traced to one graph: {error.func} selects by the values of a tensor, "
            f"in {place}",
            expected="of rows that are selected by value linear layers, pointwise operators and splits of their last "
            "dim, the same for every expert, and their sum at the places where they were selected",
            found=str(error),
            change="let every expert do no more than that to its rows (dropout: set it to 0, or drop what they sum to)",
        )
    operator = getattr(error, "func", None)  # set by fake tensors where an operator needs values
    if operator is not None:
        return CaptureError(
            f"{type(model).__name__} cannot be traced to one graph: {operator} needs the value of a tensor, in {place}",
            expected="a forward whose control flow and shapes do not depend on the values of tensors",
            found=f"{type(error).__name__} of {operator}",
            change="replace the branch on a tensor by torch.where, and .item() by a tensor or a constant",
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return CaptureError(
        f"{type(model).__name__} cannot be traced to one graph: it fails in {place}",
        expected="a forward that runs on a batch of these shapes and dtypes, with PyTorch operators only",
        found=f"{type(error).__name__}: {reason}",
        change="see whether the model runs on this batch without autopar; if it does, replace what leaves PyTorch "
        "(.numpy(), .tolist(), ...) by operators on tensors",
    )


def refuse_empty(tensors: Iterable[Tensor]) -> None:
    """InputError if a tensor of the batch has no elements."""
    shapes = [tuple(t.shape) for t in tensors]
    if any(0 in shape for shape in shapes):
        raise InputError(
            "the batch is empty",
            expected="at least one sample and one token",
            found=f"shapes {shapes}",
            change="drop empty batches (drop_last=True in the DataLoader)",
        )


@torch.inference_mode(False)
@torch.no_grad()
def fake_forward(model: nn.Module, kwargs: dict[str, Any], param_dtype: torch.dtype | None = None) -> Any:
    """What a transformers model returns for ``kwargs``, as tensors without values. Raises CaptureError."""
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    clone = _clone(model, mode, param_dtype)
    hf.prepare(clone)
    clone.eval()
    with mode, _trace_context(True, False):
        fakes = pytree.tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), kwargs)
        try:
            return clone(**fakes)
        except CaptureError:
            raise
        except Exception as error:
            raise _failure(model, error) from error


def _prepared(
    model: nn.Module, mode: Any, param_dtype: torch.dtype | None, training: bool, is_hf: bool
) -> nn.Module:
    """A copy of ``model`` to trace, on fake tensors. CaptureError if there is nothing to split."""
    clone = _clone(model, mode, param_dtype)
    if next(clone.parameters(), None) is None:
        raise CaptureError(
            f"{type(model).__name__} has no parameters",
            expected="at least one parameter",
            found="none",
            change="nothing is to be split: run it as it is",
        )
    if is_hf:
        hf.prepare(core(clone))
    if clone.training != training:  # else submodules may be in another mode than the model: a frozen batch norm
        clone.train(training)
    _attributes_to_buffers(clone)
    return clone


@torch.inference_mode(False)
@torch.enable_grad()  # the first forward for a shape may be one of an evaluation loop under no_grad
def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    training: bool | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    param_dtype: torch.dtype | None = None,
    gradients: bool = True,
    activations: Activations | None = None,
) -> Traced:
    """Trace ``model(*args, **kwargs)`` with its backward.

    Only the shapes and dtypes of the tensors in ``args`` and ``kwargs`` matter (meta tensors are fine). ``training``
    defaults to the model's own mode; ``prepare`` may change the copy that is traced. ``param_dtype`` takes the place of
    the floating point dtypes of parameters and inputs; without ``gradients`` the model counts as frozen, and
    ``activations`` are the hint of that name. Raises CaptureError, InputError, HintError.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    is_hf = hf.is_transformers_model(core(model))
    clone = _prepared(model, mode, param_dtype, model.training if training is None else training, is_hf)
    aliases = _aliases(clone)
    if prepare is not None:
        prepare(clone)
    check_called = constrain_results(clone, activations or {})
    _annotate(clone)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    refuse_empty(leaf for leaf in leaves if isinstance(leaf, Tensor))
    with mode:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fakes = [torch.empty(t.shape, dtype=compute_dtype(t, param_dtype), device="cpu") for t in tensors]
        seed = torch.empty(2, dtype=torch.int64)
    constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    flat = _Flat(clone, spec, constants, seed)
    frozen = not gradients or not any(p.requires_grad for p in clone.parameters())
    if frozen:  # traced as if it were not, for a joint graph like any other; its gradients are not asked for
        clone.requires_grad_(True)
    attributes = _plain(clone)
    with _trace_context(is_hf, is_hf and hf.may_pack(core(model), kwargs)) as stack:
        try:
            with refuse_constants():
                table = decomposition_table()
                joint = aot_export_joint_with_descriptors(stack, flat, tuple(fakes), decompositions=table)
        except (CaptureError, InputError, HintError):
            raise
        except Exception as error:
            raise _failure(model, error) from error
    check_called()
    assert flat.output_spec is not None
    _warn_of_changes(attributes, _plain(clone))
    returned = (flat.output_spec, flat.output_constants)
    return Traced(joint.graph_module, spec, constants, *returned, aliases, flat.streams, frozen)
