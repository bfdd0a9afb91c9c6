"""Pretrained weights for a model on the meta device: each rank reads its own pieces of a directory of safetensors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from autopar.capture.hf import is_transformers_model
from autopar.capture.hf_weights import Group, computed_buffers, groups_to_load, ignored, quantization
from autopar.errors import AutoparError, RuntimeFailure, WeightsError
from autopar.runtime.conversion import Conversion, Region, whole
from autopar.runtime.initialize import initialize
from autopar.runtime.parameters import Fill, Pieces, parameter_names
from autopar.runtime.process import host_group
from autopar.sharding.layout import Layout, Mesh, TensorSpec

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
#: Bytes of a file that are mapped into memory at a time.
CHUNK = 16 * 2**20

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Directory:
    """A directory that transformers' ``save_pretrained`` wrote: which tensor is in which file, and what it is."""

    path: Path
    files: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    config: Mapping[str, Any]

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Directory:
        """Read the index and the head of every file. WeightsError for a directory or file that is missing or broken."""
        folder = Path(path)
        if not folder.is_dir():
            raise _unreadable(f"there is no directory {folder}", "not found" if not folder.exists() else "a file")
        config = _read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
        if (folder / WEIGHTS).exists():
            files, index = [WEIGHTS], None
        elif (folder / INDEX).exists():
            index = _read_json(folder / INDEX).get("weight_map", {})
            files = sorted(set(index.values()))
        else:
            names = ", ".join(sorted(f.name for f in folder.iterdir())[:8])
            raise _unreadable(f"{folder} holds no safetensors", names or "an empty directory")
        where: dict[str, str] = {}
        specs: dict[str, TensorSpec] = {}
        for file in files:
            with _opened(folder / file) as handle:
                for name in sorted(handle.keys()):
                    head = handle.get_slice(name)
                    if head.get_dtype() not in _DTYPES:
                        raise _unreadable(f"{name} is stored in a packed format", str(head.get_dtype()))
                    where[name] = file
                    specs[name] = TensorSpec(tuple(head.get_shape()), _DTYPES[head.get_dtype()])
        lost = sorted(set(index or ()) - set(where))
        if lost:
            raise _unreadable(f"{folder / INDEX} names tensors that its files do not hold", _some(lost))
        return Directory(folder, where, specs, config)

    def read(self, name: str, region: Region) -> Tensor:
        """A region of one tensor, in memory of its own.

        Read by so many rows that their memory map, which is closed after each, takes no more than `CHUNK` bytes.
        """
        spec = self.specs[name]
        out = torch.empty([b - a for a, b in region], dtype=spec.dtype)
        if not region:
            with _opened(self.path / self.files[name]) as handle:
                return out.copy_(handle.get_tensor(name))
        (first, last), rest = region[0], tuple(slice(a, b) for a, b in region[1:])
        rows = max(1, CHUNK * spec.shape[0] // max(spec.bytes, 1))
        for begin in range(first, last, rows):
            end = min(begin + rows, last)
            with _opened(self.path / self.files[name]) as handle:
                out[begin - first : end - first] = handle.get_slice(name)[(slice(begin, end), *rest)]
        return out


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (OSError, SafetensorError) as error:
        found = "not found" if not file.exists() else f"{file.stat().st_size} bytes, {error}"
        raise _unreadable(f"{file} cannot be read", found) from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(f"{file} cannot be read", str(error)) from error


def _unreadable(what: str, found: str) -> WeightsError:
    return WeightsError(
        what,
        expected=f"a directory that save_pretrained wrote: {WEIGHTS}, or {INDEX} with all its files",
        found=found,
        change="check the path, and download or save the model again; other formats (pytorch_model.bin, GGUF) are read "
        "by from_pretrained, and save_pretrained then writes safetensors",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def load_from(path: str | os.PathLike[str]) -> Fill:
    """What fills a meta model with the weights in ``path`` (see `load`); all ranks fail if one does."""

    def fill(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, rank: int) -> Pieces:
        found: Pieces | Exception
        try:
            found = load(model, path, layouts, mesh, rank)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            found = error
        raise_together(found if isinstance(found, Exception) else None)
        assert isinstance(found, Pieces)
        return found

    return fill


def raise_together(error: Exception | None) -> None:
    """Raise on every rank if one rank comes with an error: its own, or the first that another rank has."""
    told = None if error is None else error if isinstance(error, AutoparError) else RuntimeFailure(repr(error))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told, group=host_group())
    for failure in [error, *every]:
        if failure is not None:
            raise failure


def load(
    model: nn.Module, path: str | os.PathLike[str], layouts: Mapping[str, Layout], mesh: Mesh, rank: int
) -> Pieces:
    """``rank``'s pieces of the parameters in ``layouts``, and all buffers, of a transformers model on the meta device,
    out of a directory that ``save_pretrained`` wrote, in the model's own dtypes.

    Names and conversions are transformers' own. Host memory: the pieces, and what one conversion needs at a time (most
    need no more than the piece). WeightsError if the directory cannot be read, if the model lacks a weight there, or
    the directory one of the model's, if a shape differs, and for quantized weights.
    """
    directory = Directory.open(path)
    _check_kind(model, directory)
    sources = _sources(model, directory)
    computed = _check_names(model, directory, sources)
    parameters: dict[str, Tensor] = {}
    if computed:
        wanted = {name: layout for name, layout in layouts.items() if name in computed}
        parameters = initialize(model, wanted, mesh, rank, seed=0).parameters
    for name, names in parameter_names(model).items():
        p = model.get_parameter(name)
        if name in layouts and name not in parameters:
            box = _box(layouts[name], mesh, p.shape, rank)
            pieces = {n: sources[n].piece(n, box, p.dtype) for n in names if n in sources}
            parameters[name] = _same_values(pieces, directory)
    buffers = computed_buffers(model)
    for name, buffer in model.named_buffers():
        if name in sources:
            buffers[name] = sources[name].piece(name, whole(buffer.shape), buffer.dtype)
    return Pieces(parameters, buffers)


def _box(layout: Layout, mesh: Mesh, shape: torch.Size, rank: int) -> Region:
    """The region of a tensor that a rank holds."""
    begin, extent = layout.starts(mesh, shape, rank), layout.local_shape(mesh, shape)
    return tuple((b, b + e) for b, e in zip(begin, extent, strict=True))


@dataclass(frozen=True)
class _Source:
    """Where a tensor of the model comes from: tensors of the directory under ``group``, converted if it needs that."""

    directory: Directory
    group: Group
    conversion: Conversion | None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor that it gives under this name."""
        if self.conversion is None:
            return self.directory.specs[self.group.sources[0][0]].shape
        return self.conversion.targets[name].shape

    def piece(self, name: str, box: Region, dtype: torch.dtype) -> Tensor:
        """A region of it, contiguous, in memory of its own. Sources are cast before they are converted, as
        transformers does."""

        def read(source: str, region: Region) -> Tensor:
            return self.directory.read(source, region).to(dtype)

        if self.conversion is None:
            return read(self.group.sources[0][0], box)
        return self.conversion.piece(name, box, read).contiguous()


def _sources(model: nn.Module, directory: Directory) -> dict[str, _Source]:
    """Where each tensor that the directory gives comes from, by its name in the model."""
    found: dict[str, _Source] = {}
    state = model.state_dict()
    for group in groups_to_load(model, directory.specs):
        if group.transform is None:
            found[group.target] = _Source(directory, group, None)
            continue
        first = state.get(group.target)
        specs = {}
        for name, _ in group.sources:
            spec = directory.specs[name]
            specs[name] = TensorSpec(spec.shape, spec.dtype if first is None else first.dtype)
        try:
            conversion = Conversion(functools.partial(group.convert, model), specs)
        except Exception as error:  # operators of transformers' mapping, on whatever shapes the files hold
            raise WeightsError(
                f"the weights of {group.target} cannot be converted from those in {directory.path}",
                expected=f"tensors that {group.transform} takes",
                found=f"{_some([f'{n} {list(s.shape)}' for n, s in specs.items()])}: {error}",
                change="check that the directory is of this model; if from_pretrained loads it, pass the model that it "
                "returns, with its weights",
            ) from error
        found |= {name: _Source(directory, group, conversion) for name in conversion.targets}
    return found


def _check_kind(model: nn.Module, directory: Directory) -> None:
    """Only transformers knows how the names in a directory and in a model belong together."""
    if not is_transformers_model(model):
        raise WeightsError(
            f"{type(model).__name__} cannot be filled from a directory",
            expected="a transformers model",
            found=f"another module, and {directory.path}",
            change="load its weights before parallelize, or with torch.distributed.checkpoint into the parallel module",
        )
    method = quantization(model, directory.config)
    if method is not None:
        raise WeightsError(
            f"the weights are quantized ({method})",
            expected="weights in a floating dtype",
            found=f"quantization_config in the config of {directory.path} or of the model",
            change="dequantize: from_pretrained, model.dequantize(), save_pretrained, and give that directory",
        )


def _check_names(model: nn.Module, directory: Directory, sources: Mapping[str, _Source]) -> list[str]:
    """WeightsError unless the directory has what the model has, in its shapes. Returns the parameters that it need not
    have, since the model's class says that they are computed."""
    state, aliases = model.state_dict(), parameter_names(model)
    covered = {name for names in aliases.values() if any(n in sources for n in names) for name in names}
    missing = [name for name in state if name not in sources and name not in covered]
    lost, unexpected = ignored(model, missing, [name for name in sources if name not in state])
    wrong = [
        f"{name}: {list(state[name].shape)} in the model, {list(source.shape(name))} in the directory"
        for name, source in sources.items()
        if name in state and tuple(state[name].shape) != source.shape(name)
    ]
    if lost or unexpected or wrong:
        parts = [(lost, "not in the directory: "), (unexpected, "not in the model: "), (wrong, "other shapes: ")]
        raise WeightsError(
            f"the weights in {directory.path} are not those of {type(model).__name__}",
            expected=f"the {len(state)} tensors of the model ({_described(model.config)})",
            found="; ".join(label + _some(names) for names, label in parts if names)
            + f" (the directory holds {_described(directory.config)})",
            change="build the model from the config in the directory; for a new head or other vocabulary, load it with "
            "from_pretrained and pass the model that it returns, with its weights",
        )
    return [name for name in missing if name in aliases]


def _described(config: Any) -> str:
    get = config.get if isinstance(config, Mapping) else functools.partial(getattr, config)
    architectures = get("architectures", None) or []
    return ", ".join([*architectures, f"model_type {get('model_type', None)}"])


def _same_values(pieces: Mapping[str, Tensor], directory: Directory) -> Tensor:
    """The values of a parameter that the directory may have under several names."""
    names = list(pieces)
    for name in names[1:]:
        if not torch.equal(pieces[names[0]], pieces[name]):
            raise WeightsError(
                f"{names[0]} and {name} are one parameter of the model and have different weights in {directory.path}",
                expected="tied weights that are equal",
                found="different values",
                change="build the model with tie_word_embeddings=False in its config",
            )
    return pieces[names[0]]
