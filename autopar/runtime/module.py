"""`ParallelModule`: the sharded program behind the interface of the model it was made from."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar._compat import pytree
from autopar.capture import batch_tensors
from autopar.capture.graph import Parameter
from autopar.capture.hf_padding import padded
from autopar.errors import InputError, RuntimeFailure
from autopar.hints import parse_bytes
from autopar.passes.bind import bind
from autopar.passes.partition import Program
from autopar.plan import Plan
from autopar.runtime.accumulate import Accumulator
from autopar.runtime.autocast import as_captured, autocast_state
from autopar.runtime.batches import (
    NOT_A_NUMBER,
    check_alike,
    check_parts,
    compares_contents,
    contents,
    describe,
    warn_of,
)
from autopar.runtime.cache import CACHE_SIZE, Cache, CacheEntry
from autopar.runtime.clip import clip
from autopar.runtime.copies import StepCopies
from autopar.runtime.failure import guarded
from autopar.runtime.optimizers import refuse_pieces
from autopar.runtime.outputs import Deferred, OutputTensor, stale
from autopar.runtime.parameters import Fill, as_dtensor, layouts_of, own_pieces, parallel_tree
from autopar.runtime.pipeline import make_pipeline, no_forward, parameter_names, shown
from autopar.runtime.precision import agree_on_overflow, inputs_as_used
from autopar.runtime.process import agree, host_group, make_device_mesh, placements
from autopar.runtime.program import Emitted, Makers, Specialization, StepProgram
from autopar.runtime.release import COMPILE, run_and_release
from autopar.runtime.save import gathered, save
from autopar.runtime.step import run_step, step_inputs
from autopar.runtime.versions import count_steps, version
from autopar.sharding.stages import homes
from autopar.workload import Workload


class _Step(torch.autograd.Function):
    """The forward program, and the backward program as its gradient. Parameters come in and gradients go out as
    DTensors in storage layout."""

    @staticmethod
    def forward(
        ctx: Any,
        module: ParallelModule,
        special: Specialization,
        program: Program,
        given: dict[str, Tensor],
        *parameters: DTensor,
    ) -> tuple[Tensor, ...]:
        values = {**given, **_local(special, parameters)}
        values.update(module._copies.take(program, parameters, values, run_and_release))
        with as_captured(module.device_mesh.device_type):
            outputs = run_and_release(program.forward, [values[name] for name in program.forward_inputs])
        results, saved = outputs[: program.num_results], outputs[program.num_results :]
        values.update(zip(program.saved, saved, strict=True))
        kept = [name for name in program.backward_inputs if name in values]
        ctx.save_for_backward(*(values[name] for name in kept))
        ctx.kept, ctx.module, ctx.special, ctx.program = kept, module, special, program
        places = zip(results, program.results, strict=True)
        ctx.mark_non_differentiable(*(r for r, i in places if special.captured.outputs[i].tangent is None))
        ctx.set_materialize_grads(False)  # which results were not used says which parameters get no gradient
        ctx.empty = [torch.empty_like(r, device="meta") for r in results]
        return tuple(results)

    @staticmethod
    @guarded("backward")
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        special: Specialization = ctx.special
        program: Program = ctx.program
        assert program.backward is not None
        values = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        ctx.maybe_clear_saved_tensors()  # from here on the values alone are held, and the graph lets go of them
        used = {place for place, tangent in zip(program.results, tangents, strict=True) if tangent is not None}
        for place, tangent, empty in zip(program.results, tangents, ctx.empty, strict=True):
            output = special.captured.outputs[place]
            if output.tangent is not None:
                if tangent is None:
                    tangent = torch.zeros_like(empty, device=ctx.module.device_mesh.device_type)
                values[special.input_name(output.tangent)] = tangent
        trained = [p.name for p in special.captured.parameters if p.gradient is not None]
        reached = {name for name in trained if used & special.reached[name]}
        inputs = [values[name] for name in program.backward_inputs]
        values.clear()
        gradients = ctx.module._accumulator.backward(program, inputs, trained, reached)
        found: list[DTensor | None] = []
        for p in special.captured.parameters:
            if p.name not in gradients:
                found.append(None)
                continue
            layout = special.assignment.sources[p.placeholder]
            gradient = gradients[p.name].to(p.storage_dtype).contiguous()
            found.append(ctx.module.dtensor(gradient, layout, p.spec.shape))
        return (None, None, None, None, *found)


def _local(special: Emitted, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """This rank's pieces of the parameters that it holds, by the name under which they enter the program."""
    names = [special.input_name(p.placeholder) for p in special.captured.parameters]
    held = zip(names, parameters, strict=True)
    return {n: p.to_local() for n, p in held if isinstance(p, DTensor)}


def _shorter(special: Specialization, place: int, length: int | None) -> torch.Size:
    """The shape of an output whose sequence is cut to ``length``; None leaves it."""
    shape = special.captured.outputs[place].node.meta["val"].shape
    if length is None:
        return torch.Size(shape)
    return torch.Size(length if d in special.length_dims[place] else size for d, size in enumerate(shape))


class ParallelModule(nn.Module):
    """A model split over all ranks, used like the model itself.

    Parameters have the model's names and are `DTensor`s on the whole mesh, so any ``torch.optim`` optimizer and
    ``torch.nn.utils.clip_grad_norm_`` work unchanged; other attributes (``config`` and the like) are the model's own.
    ``forward`` takes the global batch on every rank, or with "local" ``inputs`` each rank's own part of it along dim 0
    (ranks of one `data_rank` the same one). A scalar result (the loss) is that of the global batch and the same on
    every rank; other tensors come back as DTensors that PyTorch functions take as whole (`OutputTensor`). In training,
    what comes beside a loss is computed only if it is used (`Deferred`). ``plan`` is what was decided.

    ``grad_scaler`` is for float16: a ``torch.amp.GradScaler`` by which `train_step` scales gradients. In a loop of
    one's own ``scaler.scale(loss).backward()`` does, and in both ``scaler.step(optimizer)`` and ``scaler.update()``:
    all ranks agree on whether a gradient has overflowed.
    """

    grad_scaler: torch.amp.GradScaler | None = None

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        makers: Makers,
        inputs: str = "global",
        fill: Fill | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__["_original"] = None
        mesh = plan.mesh
        pipeline = make_pipeline(plan)
        device_mesh = make_device_mesh(mesh) if pipeline is None else pipeline.stage_mesh
        storage = {name: p.storage for name, p in plan.parameters.items()}
        held = pipeline.held(model) if pipeline is not None else list(dict(model.named_parameters()))
        layouts = {name: layout for name, layout in layouts_of(model, storage).items() if name in held}
        pieces = fill(model, layouts, mesh, dist.get_rank()) if fill is not None else None
        tree = parallel_tree(model, storage, mesh, device_mesh, pieces, held)
        own = tree if pipeline is None else shown(tree, held)
        for name, child in own._modules.items():  # named_children would leave out a module's second name
            self.add_module(name, child)
        for name, p in own.named_parameters(recurse=False):
            self.register_parameter(name, p)
        for name, b in own.named_buffers(recurse=False):
            self.register_buffer(name, b, persistent=name not in own._non_persistent_buffers_set)
        self.__dict__.update(_original=tree, _storage=storage, plan=plan, mesh=mesh, device_mesh=device_mesh)
        self.__dict__.update(_pipeline=pipeline, _makers=makers, _inputs=inputs, _cache=Cache(), _told=set())
        self.__dict__.update(_calls=0, _last_loss=None, _compiles=compile)
        self.__dict__.update(_programs=weakref.WeakKeyDictionary(), _keeps_all=False)
        device = torch.device(device_mesh.device_type)
        self.__dict__["_coordinates"] = torch.tensor(mesh.coordinates(dist.get_rank()), device=device)
        self.__dict__.update(_buckets=Workload.from_dict(plan.workload).pad_to)
        group = device_mesh.get_group("dp").group_name
        self.__dict__["_accumulator"] = Accumulator(group, self._coordinates, list(self.parameters()))
        refuse_pieces()
        count_steps()
        self.__dict__["_copies"] = StepCopies()
        self.__dict__["seed"] = torch.tensor([agree(torch.initial_seed() % 2**62), 0], device=device)
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None:
                raise
            return getattr(original, name)

    @property
    def data_rank(self) -> int:
        """This rank's place among those that work on different samples."""
        return int(self.device_mesh.get_local_rank("dp"))

    @property
    def data_world_size(self) -> int:
        """Over how many ranks the batch is split."""
        return self.mesh.degree("dp")

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold back the gradients of every backward inside: no reduction over dp, and nothing in ``p.grad``.

        The first backward outside reduces the sum of all of them and its own, once::

            for i, batch in enumerate(micro_batches):
                with model.accumulate() if i < last else contextlib.nullcontext():
                    model(**batch).loss.backward()

        Memory: while gradients are held, every rank keeps a sum of the size they have before that reduction. Between
        accumulate() and that backward an optimizer step is refused (RuntimeFailure), and so is a change of the
        parameters; `zero_grad` of this module drops what is held, that of an optimizer cannot.
        """
        self._accumulator.check()
        before, self._accumulator.active = self._accumulator.active, True
        try:
            yield
        finally:
            self._accumulator.active = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; drops also what `accumulate` holds back."""
        self._accumulator.drop()
        super().zero_grad(set_to_none)

    @guarded("train_step")
    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch, in the plan's micro-batches; adds to ``grad`` of the parameters as
        ``backward`` does and returns the loss of the global batch, a number without a gradient::

            loss = model.train_step(**batch)
            optimizer.step()
            optimizer.zero_grad()

        Takes what ``forward`` takes; nothing else that the model returns is computed. A batch of another size than the
        plan's runs in micro-batches that are no larger. With a `grad_scaler` gradients are scaled by it, the loss is
        not. Raises InputError if the model returns no loss, MicroBatchError if it mixes samples, RuntimeFailure inside
        of `accumulate` or, on every rank, if ranks differ.
        """
        if self._accumulator.active:
            raise RuntimeFailure(
                "train_step inside of accumulate()",
                expected="train_step for a whole step: it accumulates over micro-batches by itself",
                found="a with block that holds gradients back",
                change="pass the whole batch to train_step, or call model(**batch).loss.backward() inside accumulate()",
            )
        device = self.device_mesh.device_type
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
        args, kwargs, _ = self._padded(args, kwargs)
        program: StepProgram = self._take("step", args, kwargs, self._load_step)
        with torch.no_grad():
            given, each = step_inputs(program, self._given(program, args, kwargs))
            if self.grad_scaler is not None:
                loss = program.captured.outputs[program.loss]
                assert loss.tangent is not None
                name = program.input_name(loss.tangent)
                given[name] = self.grad_scaler.scale(given[name])
            parameters = [self._original.get_parameter(p.name) for p in program.captured.parameters]
            given.update(_local(program, parameters))
            with as_captured(self.device_mesh.device_type):
                if self._pipeline is None:
                    results, gradients = run_step(program.phases, given, each, run_and_release)
                else:
                    results, gradients = self._pipeline.step(program, given, each, self._bind)
            trained = [p for p in program.captured.parameters if p.gradient is not None]
            for p, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    self._add_gradient(program, p, gradient)
            if self.grad_scaler is not None and self._pipeline is not None:
                grads = [p.grad for p in self.parameters() if isinstance(p.grad, DTensor)]
                agree_on_overflow(grads, torch.device(device))
            self._update_buffers(program, dict(zip(program.places, results, strict=True)))
        loss = results[program.places.index(program.loss)]
        self._see_loss(loss)
        return loss

    def _add_gradient(self, program: StepProgram, p: Parameter, piece: Tensor) -> None:
        """Add this rank's piece of a gradient to the parameter's ``grad``."""
        parameter = self._original.get_parameter(p.name)
        piece = piece.to(p.storage_dtype).contiguous()
        gradient = self.dtensor(piece, program.storage(p.placeholder), p.spec.shape)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on all parameters: one norm over all ranks and pipeline stages, every
        element counted once, which is returned. Every rank must call it; with a scaler after ``scaler.unscale_``.
        Raises InputError for a norm that is none, RuntimeFailure if it is not finite and ``error_if_nonfinite``."""
        gradients: dict[str, DTensor] = {n: p.grad for n, p in self.named_parameters() if isinstance(p.grad, DTensor)}
        counted = [g for name, g in gradients.items() if self._counts(name)]
        device = torch.device(self.device_mesh.device_type)
        return clip(list(gradients.values()), counted, max_norm, norm_type, error_if_nonfinite, device)

    def _counts(self, name: str) -> bool:
        """Whether this rank counts a parameter: of pipeline stages that share one the first does."""
        if self._pipeline is None:
            return True
        return min(homes(parameter_names(self._original)[name], self.plan.stages)) in self._pipeline.own

    def dtensor(self, piece: Tensor, layout: Any, shape: Sequence[int]) -> DTensor:
        """A rank's piece in ``layout`` as a DTensor of global ``shape``."""
        return as_dtensor(piece, layout, self.mesh, self.device_mesh, torch.Size(shape))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``, from this module's own state dict (DTensors) or from a whole one of the
        original model, which every rank must pass. InputError for ``assign``, which would replace the parameters."""
        if assign:
            raise InputError(
                "a parallel module cannot take over the tensors of a state dict",
                expected="assign=False: values are copied, and the optimizer keeps its parameters",
                found="assign=True",
                change="leave assign out",
            )
        pieces = own_pieces(state_dict, self, self._storage, self.mesh, self.device_mesh)
        own = dict(self.named_parameters(remove_duplicate=False))
        for name, _ in self._original.named_parameters(remove_duplicate=False):
            if name not in own:  # of another pipeline stage
                pieces.pop(name, None)
        return super().load_state_dict(pieces, strict=strict)

    def save_pretrained(self, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
        """Write the model as transformers does: ``from_pretrained(directory)`` gives the whole model with these
        weights. Every rank calls it; no rank holds more than one file of ``max_shard_size`` at a time. An earlier save
        in ``directory`` is replaced when the new one is complete; other files there stay. WeightsError if the model is
        none of transformers', or the directory cannot be written."""
        save(self._original, gathered(self._original, self.plan), directory, parse_bytes(max_shard_size))

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch between training and evaluation, as ``nn.Module.train``."""
        super().train(mode)
        original = self.__dict__.get("_original")
        if original is not None:
            original.train(mode)
        return self

    @guarded("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded program on the global batch, given whole on every rank or in parts. Returns what the model
        returns. RuntimeFailure, on every rank, if ranks have other shapes, modes or arguments than one another."""
        device = self.device_mesh.device_type
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
        args, kwargs, length = self._padded(args, kwargs)
        if self._pipeline is not None and self.training and torch.is_grad_enabled():
            raise no_forward()
        special = self.specialization(args, kwargs)
        given = self._given(special, args, kwargs)
        parameters = [self._original.get_parameter(p.name) for p in special.captured.parameters]
        if not torch.is_grad_enabled() or special.program.backward is None or self._pipeline is not None:
            results = dict(enumerate(self._evaluate(special, given, parameters)))
        else:
            defer = self.training and not self._keeps_all
            program = self._bound(special, Specialization.loss_only if defer else Specialization.whole)
            results = dict(zip(program.results, _Step.apply(self, special, program, given, *parameters), strict=True))
        for place, result in results.items():
            if result.dim() == 0 and special.captured.outputs[place].tangent is not None:
                self._see_loss(result)
        self._update_buffers(special, results)
        return self._rebuild(special, results, given, parameters, length)

    def _padded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
        """The batch padded to one of the workload's buckets, with its true length; as it is if there are none."""
        if not self._buckets:
            return args, kwargs, None
        try:
            kwargs, length = padded(self._original, args, kwargs, self._buckets)
        except InputError as error:
            check_alike(str(error), host_group())  # where others go on to compare their batches with this one
            raise
        return (), kwargs, length

    def _given(self, special: Emitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """What enters a program besides parameters, by name."""
        captured, device = special.captured, self.device_mesh.device_type
        updated = {o.buffer for o in captured.outputs}
        given = {special.sharded.coordinates.name: self._coordinates}
        for b in captured.buffers:
            tensor = b.tensor(self._original).to(device)
            given[special.input_name(b.placeholder)] = tensor.clone() if b.name in updated else tensor
        batch = inputs_as_used(captured, batch_tensors(args, kwargs))
        given.update({special.input_name(node): t for node, t in zip(captured.inputs, batch, strict=True)})
        if captured.seed is not None:
            given[special.input_name(captured.seed)] = self.seed.clone()
            self.seed[1] += 1
        return given

    @torch.no_grad()
    def _evaluate(
        self, special: Specialization, given: dict[str, Tensor], parameters: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """All results, by a program that keeps nothing for a backward."""
        values = {**given, **_local(special, parameters)}
        if self._pipeline is not None:
            found: tuple[Tensor, ...] = self._pipeline.evaluate(special, values, self._bind)
            return found
        program = self._bound(special, Specialization.evaluation)
        values.update(self._copies.take(program, parameters, values, run_and_release))
        with as_captured(self.device_mesh.device_type):
            outputs: tuple[Tensor, ...] = run_and_release(program.forward, [values[n] for n in program.forward_inputs])
            return outputs

    @torch.no_grad()
    def _update_buffers(self, special: Emitted, results: dict[int, Tensor]) -> None:
        """Put the new values of buffers that the forward changes into the model's own."""
        held = {b.name: b for b in special.captured.buffers}
        for place, output in enumerate(special.captured.outputs):
            if output.buffer is not None:
                held[output.buffer].tensor(self._original).copy_(results.pop(place))

    def _rebuild(
        self,
        special: Specialization,
        results: dict[int, Tensor],
        given: dict[str, Tensor],
        parameters: Sequence[Tensor],
        length: int | None,
    ) -> Any:
        """What the model would have returned: its structure, with an `OutputTensor` or a `Deferred` for all but
        scalars; cut to ``length`` tokens where the batch was padded."""
        versions = [version(p) for p in parameters]

        def late(place: int) -> Tensor:
            if versions != [version(p) for p in parameters]:
                raise stale(f"output {place}")
            self.__dict__["_keeps_all"] = True
            return self._output(special, place, self._evaluate(special, given, parameters)[place], length)

        captured = special.captured
        found: list[Tensor | Deferred] = []
        for place, output in enumerate(captured.outputs):
            if place in results:
                found.append(self._output(special, place, results[place], length))
            elif output.buffer is None:
                val = output.node.meta["val"]
                shape = _shorter(special, place, length)
                found.append(Deferred(shape, val.dtype, functools.partial(late, place)))
        tensors, constants = iter(found), dict(captured.output_constants)
        count = captured.output_spec.num_leaves
        leaves = [constants[i] if i in constants else next(tensors) for i in range(count)]
        return pytree.tree_unflatten(leaves, captured.output_spec)

    def _output(self, special: Specialization, place: int, result: Tensor, length: int | None) -> Tensor:
        """One result as the user gets it."""
        if result.dim() == 0:
            return result
        val = special.captured.outputs[place].node.meta["val"]
        layout = special.assignment.sinks[place]
        tensor: Any = DTensor.from_local(
            result,
            self.device_mesh,
            placements(layout, self.mesh),
            run_check=False,
            shape=val.shape,
            stride=val.stride(),
        )
        for dim, size in enumerate(_shorter(special, place, length)):
            if size < tensor.shape[dim]:
                tensor = tensor.narrow(dim, 0, size)
        return OutputTensor.of(tensor)

    def _bound(self, special: Specialization, make: Callable[[Specialization], Program]) -> Program:
        """A program of a specialisation, bound to this process when it is first used."""
        programs: dict[str, Program] = self._programs.setdefault(special, {})
        if make.__name__ not in programs:
            program = programs[make.__name__] = make(special)
            copies = program.copies.module if program.copies is not None else None
            for graph in (program.forward, program.backward, copies):
                if graph is not None:
                    self._bind(graph)
        return programs[make.__name__]

    def specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        """The program for a batch's shapes: made once, the same on every rank, then kept."""
        found: Specialization = self._take("forward", args, kwargs, self._load)
        return found

    def _take(
        self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], load: Callable[[tuple[Any, ...], Any], Any]
    ) -> Any:
        """What ``load`` makes for a batch's shapes, or has made before. RuntimeFailure if ranks ask for different
        things."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        frozen = tuple(p.requires_grad for p in self._original.parameters())
        casts = autocast_state(self.device_mesh.device_type)
        key = (what, str(spec), repr(shapes), self.training, frozen, casts)
        entry = CacheEntry(tuple(tuple(t.shape) for t in batch_tensors(args, kwargs)), self.training)
        cache: Cache[Any] = self._cache
        kept = "kept" if key in cache else "not made yet"
        modes = f"{what}, training={self.training}, gradients={torch.is_grad_enabled()}, {casts}, program {kept}"
        self._check_batch(args, kwargs, modes)
        return cache.take(key, entry, lambda: load(args, kwargs))

    def _see_loss(self, loss: Tensor) -> None:
        """Warn, once and on every rank, of a loss that is not a number; on a GPU one call later, not to wait for it."""
        last, self.__dict__["_last_loss"] = self._last_loss, loss.detach()
        seen = loss if loss.device.type == "cpu" else last
        if seen is not None and ("nan", None) not in self._told and bool(torch.isnan(seen)):
            self._told.add(("nan", None))
            warnings.warn(f"rank {dist.get_rank()}: {NOT_A_NUMBER}", UserWarning, stacklevel=3)

    def _check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], modes: str) -> None:
        """RuntimeFailure on all ranks if their batches differ: in shapes always, in contents now and then."""
        words, compared = f"{describe(args, kwargs)}; {modes}", compares_contents(self._calls)
        self.__dict__["_calls"] += 1
        digest = contents(batch_tensors(args, kwargs)) if compared and dist.get_world_size() > 1 else ""
        whole = self._inputs == "global"
        check_alike(f"{words}; contents {digest}" if digest and whole else words, host_group())
        if digest and not whole:
            check_parts(self.data_rank, digest, host_group())

    @property
    def specializations(self) -> tuple[CacheEntry, ...]:
        """The programs kept at the moment, the longest unused first; at most ``CACHE_SIZE`` of them."""
        return self._cache.entries()

    def extra_repr(self) -> str:
        """The plan, and how many programs are kept."""
        return f"{self.plan}; {len(self.specializations)} of at most {CACHE_SIZE} programs kept"

    def _load(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        """Make a program and compare it between ranks."""
        special = self._makers.forward(
            self._original, self.plan, args, kwargs, training=self.training, inputs=self._inputs
        )
        self._compare(special.program.hash())
        if dist.get_rank() == 0:
            warn_of(special.fallbacks, self._told)
        return special

    def _load_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepProgram:
        """Make the program of a step, compare it between ranks and bind it to this process."""
        program = self._makers.step(
            self._original, self.plan, args, kwargs, training=self.training, inputs=self._inputs
        )
        self._compare(program.hash())
        if self._pipeline is None:
            for phase in program.phases.all():
                self._bind(phase.module)
        return program

    def _bind(self, graph: fx.GraphModule) -> None:
        groups = {axis: self.device_mesh.get_group(axis).group_name for axis in self.mesh.names}
        bind(graph, groups, torch.device(self.device_mesh.device_type))
        graph.meta[COMPILE] = self._compiles

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
