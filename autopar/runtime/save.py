"""Writing a parallel model as transformers writes one: gathered tensor by tensor, one file of the directory at a time.

The new directory is made beside the old one, under a hidden name, and takes its place by renaming when it is complete,
so a save that is interrupted leaves the old one as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.capture.hf import is_transformers_model
from autopar.capture.hf_adapters import adapter_names, is_adapted, save_adapters
from autopar.capture.hf_weights import Group, groups_to_save, names_to_save, save_configs
from autopar.errors import AutoparError, RuntimeFailure, WeightsError
from autopar.plan import Plan
from autopar.runtime.heap import trim
from autopar.runtime.parameters import layouts_of, parameter_names
from autopar.runtime.process import agree, host_group
from autopar.runtime.weights import INDEX, WEIGHTS
from autopar.schedule import stage_ranks
from autopar.sharding.layout import Layout, Mesh, TensorSpec
from autopar.sharding.stages import homes

#: Makes the tensor of a name whole, in rank 0's host memory; None on other ranks. All ranks call it.
Gather = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class _Part:
    """Tensors that are converted together: results under their names in the files."""

    group: Group
    renamed: Mapping[str, str]
    specs: Mapping[str, TensorSpec]

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.specs.values())


def gathered(model: nn.Module, plan: Plan) -> Gather:
    """What makes the parameters of a tree of DTensors whole on rank 0, one at a time; other ranks only send their
    pieces. In a pipeline a rank has no values of parameters of other stages."""
    storage = {name: p.storage for name, p in plan.parameters.items()}
    state, layouts, begins = model.state_dict(keep_vars=True), layouts_of(model, storage), _begins(model, plan)
    first = {id(p): name for name, p in model.named_parameters()}

    def gather(name: str) -> Tensor | None:
        tensor = state[name].detach()
        if id(state[name]) not in first:  # a buffer, which all ranks have
            return tensor.cpu() if dist.get_rank() == 0 else None
        main = first[id(state[name])]
        piece = tensor.to_local() if isinstance(tensor, DTensor) else None
        return _collect(piece, TensorSpec(tuple(tensor.shape), tensor.dtype), layouts[main], plan.mesh, begins[main])

    return gather


def _begins(model: nn.Module, plan: Plan) -> dict[str, int]:
    """The first of the ranks on which a parameter, by its first name, lies: those of the first stage that has it."""
    names = parameter_names(model)
    if plan.schedule is None:
        return dict.fromkeys(names, 0)
    places = stage_ranks(plan.schedule, plan.degrees["pp"], len(plan.stages))
    return {n: plan.mesh.size * min(places[s] for s in homes(every, plan.stages)) for n, every in names.items()}


def _collect(piece: Tensor | None, spec: TensorSpec, layout: Layout, mesh: Mesh, begin: int) -> Tensor | None:
    """All pieces of a tensor put together in rank 0's host memory, each sent by the first rank that has it; ``begin``
    is the first rank of the mesh on which it lies, ``piece`` what this rank has of it."""
    rank, group = dist.get_rank(), host_group()
    owners: dict[tuple[int, ...], int] = {}
    for other in range(mesh.size):
        owners.setdefault(layout.starts(mesh, spec.shape, other), other)
    if rank != 0:
        if rank - begin in owners.values():
            assert piece is not None
            dist.send(piece.cpu().contiguous(), 0, group=group)
        return None
    whole = torch.empty(spec.shape, dtype=spec.dtype)
    for owner in owners.values():
        place = layout.local_slice(mesh, whole, owner)
        if begin + owner == 0:
            assert piece is not None
            place.copy_(piece)
        else:
            part = torch.empty(place.shape, dtype=spec.dtype)
            dist.recv(part, begin + owner, group=group)
            place.copy_(part)
    return whole


def save(model: nn.Module, gather: Gather, directory: str | os.PathLike[str], max_file: int) -> None:
    """Write ``model`` to ``directory`` in files of at most ``max_file`` bytes (what is converted together and is larger
    has its own), with its config; other files that the directory has stay. All ranks call it, rank 0 writes, and all
    return when the directory is complete. Of a model with PEFT's adapters those alone are written.

    Host memory: one file on rank 0, one piece on others. WeightsError, on every rank, for a model that is not of
    transformers, or if the directory cannot be written.
    """
    if is_adapted(model):
        _save_adapters(model, gather, Path(os.path.realpath(directory)))
        return
    if not is_transformers_model(model):
        raise WeightsError(
            f"save_pretrained does not know how {type(model).__name__} is stored",
            expected="a transformers model",
            found="another module",
            change="use torch.distributed.checkpoint: dcp.save({'model': model.state_dict()}, checkpoint_id=directory)",
        )
    files = _files(_parts(model), max_file)
    target = Path(os.path.realpath(directory))
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    writes = dist.get_rank() == 0
    try:
        _on_writer(writes, unfinished.mkdir, parents=True)
        for name, parts in files.items():
            _write_file(model, gather, parts, unfinished / name, writes)
            trim()
        _on_writer(writes, _complete, model, files, unfinished, target)
    finally:
        if writes:
            shutil.rmtree(unfinished, ignore_errors=True)


def _save_adapters(model: nn.Module, gather: Gather, target: Path) -> None:
    """Write the adapters of a PEFT model, of which rank 0 gathers all: each file takes the place of an older one when
    all are complete."""
    tensors = {}
    for name in dict.fromkeys(name for names in adapter_names(model).values() for name in names.values()):
        whole = gather(name)
        if whole is not None:
            tensors[name] = whole
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

    def write() -> None:
        save_adapters(model, tensors, unfinished)
        shutil.copytree(unfinished, target, copy_function=os.replace, dirs_exist_ok=True)

    writes = dist.get_rank() == 0
    try:
        _on_writer(writes, write)
    finally:
        if writes:
            shutil.rmtree(unfinished, ignore_errors=True)


def _write_file(model: nn.Module, gather: Gather, parts: Sequence[_Part], file: Path, writes: bool) -> None:
    """Gather and write the tensors of one file, which are let go of on return."""
    tensors = dict(_converted(model, gather, parts, writes))
    _on_writer(writes, save_file, tensors, file, {"format": "pt"})


def _on_writer(writes: bool, action: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Do something on rank 0, which ``writes``; every rank raises its error."""
    error: Exception | None = None
    if writes:
        try:
            action(*args, **kwargs)
        except Exception as found:  # whatever it is, the other ranks must not wait for this one
            error = found
    told = agree(None if error is None else error if isinstance(error, AutoparError) else _unwritable(error))
    if told is not None:
        raise told from error


def _unwritable(error: Exception) -> AutoparError:
    if not isinstance(error, OSError):
        return RuntimeFailure(f"rank 0 could not save the model: {error!r}")
    return WeightsError(
        "the model cannot be saved",
        expected="a directory that can be written, on a file system with enough space",
        found=str(error),
        change="check the path; what was saved there before is as it was",
    )


def _parts(model: nn.Module) -> list[_Part]:
    """Everything that is saved, with the names and shapes that it has in the files: each conversion run on meta."""
    state = model.state_dict()
    found = []
    for group, rename in groups_to_save(model, names_to_save(model)):
        given = {n: torch.empty(state[n].shape, dtype=state[n].dtype, device="meta") for n, _ in group.sources}
        results = group.convert(model, given)
        renamed = {name: rename(name) for name in results}
        specs = {renamed[name]: TensorSpec(tuple(t.shape), t.dtype) for name, t in results.items()}
        found.append(_Part(group, renamed, specs))
    return found


def _files(parts: Sequence[_Part], max_file: int) -> dict[str, list[_Part]]:
    """Parts by the file that they are in."""
    files: list[list[_Part]] = [[]]
    held = 0
    for part in parts:
        if files[-1] and held + part.bytes > max_file:
            files.append([])
            held = 0
        files[-1].append(part)
        held += part.bytes
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {f"{stem}-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)}


def _converted(
    model: nn.Module, gather: Gather, parts: Sequence[_Part], writes: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file, by their names there; none on ranks that do not write."""
    for part in parts:
        tensors = {}
        for name, _ in part.group.sources:
            whole = gather(name)
            if whole is not None:
                tensors[name] = whole
        if writes:
            for name, tensor in part.group.convert(model, tensors).items():
                yield part.renamed[name], tensor.contiguous()


def _complete(model: nn.Module, files: Mapping[str, Sequence[_Part]], unfinished: Path, target: Path) -> None:
    """The index and the configs, and the new directory in the place of the old one."""
    if len(files) > 1:
        specs = {name: (file, spec) for file, parts in files.items() for p in parts for name, spec in p.specs.items()}
        index = {
            "metadata": {
                "total_parameters": sum(p.numel() for p in model.parameters()),
                "total_size": sum(spec.bytes for _, spec in specs.values()),
            },
            "weight_map": {name: file for name, (file, _) in specs.items()},
        }
        (unfinished / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_configs(model, unfinished)
    if target.exists():
        for kept in target.iterdir():
            if _is_weights(kept.name) or (unfinished / kept.name).exists():
                continue
            if kept.is_dir():
                shutil.copytree(kept, unfinished / kept.name, copy_function=_link)
            else:
                _link(kept, unfinished / kept.name)
        old = target.with_name(f"{unfinished.name}.old")
        target.rename(old)
        unfinished.rename(target)
        shutil.rmtree(old)
    else:
        unfinished.rename(target)


def _link(source: str | Path, target: str | Path) -> None:
    """The same file in another directory, without copying it where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _is_weights(name: str) -> bool:
    """Whether a file holds weights of a save before this one."""
    stem = WEIGHTS.removesuffix(".safetensors")
    return name == INDEX or (name.startswith(stem) and name.endswith(".safetensors"))
