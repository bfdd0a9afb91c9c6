"""What knows how transformers names, converts and initialises weights; files are read and written in `runtime`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def rebuild(model: nn.Module) -> nn.Module:
    """A transformers model made again from the config of ``model``, on the device of the moment, drawing what its
    constructors draw.

    A config's dtype is that of the weights where the model was made by ``from_config``; one that was cast afterwards
    drew its weights in the default dtype.
    """
    config: Any = copy.deepcopy(model.config)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    drawn = own if getattr(config, "dtype", None) == own else torch.get_default_dtype()
    kind: Any = type(model)
    made: nn.Module = kind._from_config(config, dtype=drawn)
    return made


def initialize_in_place(model: nn.Module) -> None:
    """Run the model's own ``init_weights`` on memory that holds nothing yet."""
    whole: Any = model
    for module in whole.modules():
        module._is_hf_initialized = False
    whole.init_weights()
    whole.tie_weights()


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together. ``sources`` are their names, in order, each with the pattern that it
    matched; ``target`` is the name by which transformers knows the group. ``transform`` is transformers' own object;
    None where the one source only has another name."""

    target: str
    transform: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results by name, from all sources by name."""
        if self.transform is None:
            return {self.target: tensors[self.sources[0][0]]}
        transform = copy.deepcopy(self.transform)
        for name, pattern in self.sources:
            transform.add_tensor(self.target, name, pattern, tensors[name])
        found = transform.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def groups_to_load(model: nn.Module, names: Iterable[str]) -> list[Group]:
    """How the tensors of a checkpoint, by name, become those of ``model``'s state dict, as ``from_pretrained`` does it.

    Targets that the model does not have are kept: the caller knows which of them are errors (`ignored`).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    known: Any = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix: Any = model.base_model_prefix
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, Group(target, converter)).sources.append((name, pattern or name))
    return list(groups.values())


def groups_to_save(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[Group, Callable[[str], str]]]:
    """How tensors of ``model``'s state dict, by name, become those of a checkpoint, as ``save_pretrained`` does it.
    With each group goes what renames its results."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:  # not from from_pretrained: nobody knows whether its checkpoint had the prefix
        found = get_model_conversion_mapping(model, add_legacy=False)
        mapping = [t for t in found if not isinstance(t, PrefixChange)]
    reverse = [t.reverse_transform() for t in reversed(mapping)]
    renamings = [t for t in reverse if isinstance(t, WeightRenaming)]
    converters = [t for t in reverse if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            target = apply_renamings(name, renamings)
        converter = by_pattern[pattern] if pattern is not None else None
        groups.setdefault(target, Group(target, converter)).sources.append((name, pattern or name))
    for group in groups.values():
        renamed = group.transform is not None  # the names of others are final
        yield group, (lambda name: apply_renamings(name, renamings)) if renamed else (lambda name: name)


def ignored(model: nn.Module, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
    """What is left of missing and unexpected names without those that the model's class says do not matter."""
    from transformers.utils.loading_report import LoadStateDictInfo

    info = LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        conversion_errors={},
        error_msgs=[],
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)  # type: ignore[operator]
    return sorted(info.missing_keys), sorted(info.unexpected_keys)


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers of a meta model, by name, as the model computes them itself (frequencies, position ids), on the host.

    Its parameters stay on meta and are taken for initialised.
    """
    memo: dict[int, object] = {id(b): torch.empty_like(b, device="cpu") for b in model.buffers() if b.is_meta}
    copied: Any = copy.deepcopy(model, memo)
    for module in copied.modules():
        module._is_hf_initialized = False
    for p in copied.parameters():
        p._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        copied.initialize_weights()
    return {name: b.detach() for name, b in copied.named_buffers()}


def quantization(model: nn.Module, config: Mapping[str, Any]) -> str | None:
    """The method by which a checkpoint, whose ``config.json`` is ``config``, or the model is quantized; None if it is
    not."""
    own = getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None)
    found = own or config.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", found)
    return str(getattr(method, "value", method))


def names_to_save(model: nn.Module) -> list[str]:
    """The names of a model's state dict that ``save_pretrained`` writes: each tensor once, by its main name."""
    whole: Any = model
    secondary = set(whole.all_tied_weights_keys)
    ignore = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    main = [next((n for n in tied if n not in secondary), tied[0]) for tied in names.values()]
    return [name for name in main if name not in ignore]


def save_configs(model: nn.Module, directory: Path) -> None:
    """The config, with the model's class and dtype, and the generation config."""
    whole: Any = model
    config = copy.deepcopy(whole.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(whole.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if whole.can_generate():
        whole.generation_config.save_pretrained(directory)
