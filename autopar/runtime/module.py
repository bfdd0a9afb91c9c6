"""`ParallelModule`: the sharded program behind the interface of the model it was made from."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._compat import dtensor_like, pytree
from autopar.capture import batch_tensors
from autopar.capture.hf_experts import count_tokens, router_biases
from autopar.capture.hf_padding import padded
from autopar.errors import InputError, RuntimeFailure
from autopar.hints import parse_bytes
from autopar.passes.partition import Program
from autopar.plan import Plan
from autopar.runtime.accumulate import Accumulator
from autopar.runtime.attributes import carry
from autopar.runtime.autocast import as_captured
from autopar.runtime.autograd import ProgramFunction, Surroundings, local_pieces
from autopar.runtime.batches import NOT_A_NUMBER
from autopar.runtime.cache import CACHE_SIZE, CacheEntry
from autopar.runtime.clip import clip
from autopar.runtime.copies import StepCopies
from autopar.runtime.failure import guarded
from autopar.runtime.generate import generate
from autopar.runtime.optimizers import refuse_pieces
from autopar.runtime.outputs import stale
from autopar.runtime.parameters import Fill, layouts_of, own_pieces, parallel_tree, parameter_at, parameter_names
from autopar.runtime.pipeline import make_pipeline, no_forward, shown
from autopar.runtime.precision import agree_on_overflow, inputs_as_used
from autopar.runtime.process import agree, make_device_mesh
from autopar.runtime.program import Emitted, Makers, Specialization, StepProgram
from autopar.runtime.programs import Programs
from autopar.runtime.release import run_and_release
from autopar.runtime.results import rebuild
from autopar.runtime.router import ExpertLoad, loads, update_biases
from autopar.runtime.save import gathered, save
from autopar.runtime.step import run_step, step_inputs
from autopar.runtime.versions import count_steps, version
from autopar.sharding.axes import data_degree, data_rank, is_of_tokens
from autopar.sharding.stages import homes
from autopar.workload import Workload


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
        self.__dict__.update(_original=None, _shown=None)
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
        self.__dict__.update(_original=tree, _shown=own, _storage=storage)
        self.__dict__.update(plan=plan, mesh=mesh, device_mesh=device_mesh)
        programs = Programs(tree, plan, makers, device_mesh, inputs, compile)
        self.__dict__.update(_pipeline=pipeline, _programs=programs, _last_loss=None, _keeps_all=False)
        device = torch.device(device_mesh.device_type)
        self.__dict__["_coordinates"] = torch.tensor(mesh.coordinates(dist.get_rank()), device=device)
        self.__dict__.update(_buckets=Workload.from_dict(plan.workload).pad_to)
        groups = [name for axis, name in programs.groups.items() if is_of_tokens(axis)]
        self.__dict__["_accumulator"] = Accumulator(groups, self._coordinates, list(self.parameters()))
        refuse_pieces()
        count_steps()
        self.__dict__["_copies"] = StepCopies()
        self.__dict__["seed"] = torch.tensor([agree(torch.initial_seed() % 2**62), 0], device=device)
        if router_biases(tree):
            count_tokens(tree, device)
        self.training = model.training  # submodules have their own modes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            shown = self.__dict__.get("_shown")
            if shown is None:
                raise
            return getattr(shown, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that the model has is set there, where its forward sees it. InputError for a parameter or a
        module in the place of another: the plan knows nothing of it."""
        shown = self.__dict__.get("_shown")
        if shown is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(shown, name):
            super().__setattr__(name, value)
            return
        if name in self._modules or name in self._parameters:
            raise InputError(
                f"{name} of a parallel module cannot be replaced",
                expected="the modules and parameters that it was planned with; their values may change in place",
                found=f"an assignment of {type(value).__name__}",
                change="replace it in the model before parallelize",
            )
        if name in self._buffers:
            super().__setattr__(name, value)
        for module in (shown, self._original):
            setattr(module, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module of its own, without gradients, as the copy of a model is. Left to themselves DTensors copy theirs,
        and fail at those that lie inside of a larger tensor, as gradients do that were reduced together."""
        gradients = [p.grad for p in self.parameters()]
        memo.update({id(gradient): None for gradient in gradients if gradient is not None})
        twin: ParallelModule = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @property
    def data_rank(self) -> int:
        """This rank's place among those that work on different samples."""
        return data_rank(self.mesh, dist.get_rank())

    @property
    def data_world_size(self) -> int:
        """Over how many ranks the batch is split."""
        return data_degree(self.mesh)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold back the gradients of every backward inside: no reduction over dp and cp, and nothing in ``p.grad``.

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
        self._see_attributes()
        program: StepProgram = self._programs.step(args, kwargs)
        with torch.no_grad():
            given, each = step_inputs(program, self._given(program, args, kwargs))
            if self.grad_scaler is not None:
                loss = program.captured.outputs[program.loss]
                assert loss.tangent is not None
                name = program.input_name(loss.tangent)
                given[name] = self.grad_scaler.scale(given[name])
            parameters = [parameter_at(self._original, p.name) for p in program.captured.parameters]
            given.update(local_pieces(program, parameters))
            with as_captured(self.device_mesh.device_type):
                if self._pipeline is None:
                    results, gradients = run_step(program.phases, given, each, run_and_release)
                else:
                    results, gradients = self._pipeline.step(program, given, each, self._programs.bind)
            held = zip(program.captured.parameters, parameters, strict=True)
            trained = [(p, parameter) for p, parameter in held if p.gradient is not None]
            for (p, parameter), gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    _add_gradient(parameter, gradient.to(p.storage_dtype))
            if self.grad_scaler is not None and self._pipeline is not None:
                grads = [p.grad for p in self.parameters() if isinstance(p.grad, DTensor)]
                agree_on_overflow(grads, torch.device(device))
            self._update_buffers(program, dict(zip(program.places, results, strict=True)))
        loss = results[program.places.index(program.loss)]
        self._see_loss(loss)
        return loss

    @guarded("clip_grad_norm_")
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

    @guarded("save_pretrained")
    def save_pretrained(self, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
        """Write the model as transformers does: ``from_pretrained(directory)`` gives the whole model with these
        weights. Every rank calls it; no rank holds more than one file of ``max_shard_size`` at a time. An earlier save
        in ``directory`` is replaced when the new one is complete; other files there stay. WeightsError if the model is
        none of transformers', or the directory cannot be written."""
        save(self._original, gathered(self._original, self.plan), directory, parse_bytes(max_shard_size))

    def expert_load(self) -> dict[str, ExpertLoad]:
        """The tokens that every expert of every mixture was sent in training since the last `router_bias_update`, of
        all ranks and micro-batches, by the name of the module of experts. Where routers have no such bias it is counted
        from the first call on, which every rank must make. InputError for a model without mixtures."""
        if not router_biases(self._original) and not self._programs.counts:
            count_tokens(self._original, self._coordinates.device)
            self._programs.counts = True
        return loads(self._original)

    def router_bias_update(self, rate: float) -> None:
        """Balance experts as DeepSeek-V3 does, without a loss: add ``rate`` to the bias in the choice of every expert
        that was sent fewer tokens than the mean since the last call, and subtract it from that of every one that was
        sent more::

            loss = model.train_step(**batch)
            optimizer.step()
            model.router_bias_update(0.001)

        Tokens of all ranks and micro-batches count, so that the bias is the same on every rank, and that of one
        process. InputError for a model whose routers have no ``e_score_correction_bias``."""
        update_biases(self._original, rate)

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch between training and evaluation, as ``nn.Module.train``."""
        super().train(mode)
        for model in (self.__dict__.get("_shown"), self.__dict__.get("_original")):
            if model is not None:
                model.train(mode)
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
        self._see_attributes()
        special = self.specialization(args, kwargs)
        given = self._given(special, args, kwargs)
        parameters = [parameter_at(self._original, p.name) for p in special.captured.parameters]
        if not torch.is_grad_enabled() or special.program.backward is None or self._pipeline is not None:
            results = dict(enumerate(self._evaluate(special, given, parameters)))
        else:
            defer = self.training and not self._keeps_all
            program = self._programs.bound(special, Specialization.loss_only if defer else Specialization.whole)
            around = Surroundings(self.device_mesh.device_type, self._copies, self._accumulator)
            outputs = ProgramFunction.apply(around, special, program, given, *parameters)
            results = dict(zip(program.results, outputs, strict=True))
        for place, result in results.items():
            if result.dim() == 0 and special.captured.outputs[place].tangent is not None:
                self._see_loss(result)
        self._update_buffers(special, results)
        versions = [version(p) for p in parameters]

        def late(place: int) -> Tensor:
            if versions != [version(p) for p in parameters]:
                raise stale(f"output {place}")
            self.__dict__["_keeps_all"] = True
            return self._evaluate(special, given, parameters)[place]

        return rebuild(special, results, late, self.device_mesh, length)

    @guarded("generate")
    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own ``generate``: the loop is transformers', its forwards are run by all ranks together, and
        the keys and values of past tokens are split over them. Every rank passes the same prompts and options and gets
        all answers, for sampling after ``torch.manual_seed`` with one seed. Greedy, sampling and beams; InputError for
        other ways, for models that are no decoders, and for more tokens than a plan for inference has memory for.
        """
        return generate(self, args, kwargs)

    def _padded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
        """The batch padded to one of the workload's buckets, with its true length; as it is if there are none."""
        if not self._buckets:
            return args, kwargs, None
        try:
            kwargs, length = padded(self._original, args, kwargs, self._buckets)
        except InputError as error:
            self._programs.compare(str(error))  # where others go on to compare their batches with this one
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
        self,
        special: Specialization,
        given: dict[str, Tensor],
        parameters: Sequence[Tensor],
        make: Callable[[Specialization], Program] = Specialization.evaluation,
    ) -> tuple[Tensor, ...]:
        """All results, by the program that ``make`` makes, which keeps nothing for a backward."""
        values = {**given, **local_pieces(special, parameters)}
        if self._pipeline is not None:
            found: tuple[Tensor, ...] = self._pipeline.evaluate(special, values, self._programs.bind)
            return found
        program = self._programs.bound(special, make)
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

    def specialization(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialization:
        """The program for a batch's shapes: made once, the same on every rank, then kept."""
        found: Specialization = self._programs.forward(args, kwargs)
        return found

    def _see_attributes(self) -> None:
        """Programs are made of the whole model; a pipeline shows a copy of it, which has what the user changed."""
        if self._shown is not self._original:
            carry(self._shown, self._original)

    def _see_loss(self, loss: Tensor) -> None:
        """Warn, once and on every rank, of a loss that is not a number; on a GPU one call later, not to wait for it."""
        last, self.__dict__["_last_loss"] = self._last_loss, loss.detach()
        seen = loss if loss.device.type == "cpu" else last
        if seen is not None and ("nan", None) not in self._programs.told and bool(torch.isnan(seen)):
            self._programs.told.add(("nan", None))
            warnings.warn(f"rank {dist.get_rank()}: {NOT_A_NUMBER}", UserWarning, stacklevel=3)

    @property
    def specializations(self) -> tuple[CacheEntry, ...]:
        """The programs kept at the moment, the longest unused first; at most ``CACHE_SIZE`` of them."""
        return self._programs.cache.entries()

    def extra_repr(self) -> str:
        """The plan, and how many programs are kept."""
        return f"{self.plan}; {len(self.specializations)} of at most {CACHE_SIZE} programs kept"


def _add_gradient(parameter: nn.Parameter, piece: Tensor) -> None:
    """Add this rank's piece of a gradient to the ``grad`` of a parameter."""
    gradient = dtensor_like(piece.contiguous(), parameter)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
