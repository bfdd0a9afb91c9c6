"""Models that something else has changed already, so that they cannot be split: each refused in its own words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from autopar._compat import FakeTensor
from autopar.errors import AutoparError, CaptureError, PlanError

#: Modules that hold a model and distribute it in their own way, by the words for that.
_WRAPPERS: dict[type[nn.Module], str] = {
    nn.parallel.DistributedDataParallel: "DistributedDataParallel",
    nn.DataParallel: "DataParallel",
    FullyShardedDataParallel: "FullyShardedDataParallel",
}
#: Dtypes of packed weights: no parameter that is trained has one.
_PACKED = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2})


def refuse_changed(model: nn.Module) -> None:
    """Raise for a model that cannot be split as it is. PlanError if it is parallel already, CaptureError if it is
    compiled, wrapped, spread over devices by accelerate, quantized, or has lazy modules that have seen no batch."""
    for error in _reasons(model):
        raise error


def _reasons(model: nn.Module) -> Iterator[AutoparError]:
    name = type(model).__name__
    if any(isinstance(p, DTensor) for p in model.parameters()):
        yield PlanError(
            f"{name} is parallel already",
            expected="a model with ordinary parameters",
            found="DTensor parameters",
            change="pass the original model",
        )
    for path, module in model.named_modules():
        where = f"its module {path}" if path else "it"
        if _is_compiled(module):
            yield CaptureError(
                f"{name} is compiled already: {where} is what torch.compile returned",
                expected="a model as it is written",
                found=type(module).__name__,
                change="pass the model without torch.compile; parallelize(model, compile=True) compiles what comes out",
            )
        for wrapper, word in _WRAPPERS.items():
            if isinstance(module, wrapper):
                yield CaptureError(
                    f"{name} is wrapped already: {where} is a {word}",
                    expected="a model that nothing else distributes",
                    found=word,
                    change="pass the model inside (.module); a plan splits the batch and shards state by itself",
                )
        if getattr(module, "_hf_hook", None) is not None:
            yield CaptureError(
                f"{name} is spread over devices already: {where} has hooks of accelerate",
                expected="a model whose weights are on one device, or on meta",
                found=f"{type(module._hf_hook).__name__}",
                change="load it without device_map",
            )
    yield from _unfinished(model)
    yield from _quantized(model)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made or changed a module (looked up by name: to import it takes long)."""
    kind = type(module)
    wrapped = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return wrapped or module._compiled_call_impl is not None


def _unfinished(model: nn.Module) -> Iterator[AutoparError]:
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            yield CaptureError(
                f"{name} of {type(model).__name__} has no shape yet",
                expected="parameters with shapes",
                found="a lazy module that has seen no batch",
                change="run one batch through the model first",
            )


def _quantized(model: nn.Module) -> Iterator[AutoparError]:
    for name, p in model.named_parameters():
        packed = p.dtype in _PACKED or not _is_plain(p)
        if packed or getattr(model, "is_quantized", False):
            method = getattr(model, "quantization_method", None)
            kind = f"{type(p).__name__} of {p.dtype}" if packed else f"a model quantized by {method}"
            yield CaptureError(
                f"{type(model).__name__} is quantized: {name} is packed" if packed else "the model is quantized",
                expected="weights in a floating dtype, of which any part can be taken",
                found=kind,
                change="load it without quantization (or model.dequantize()); for less memory see Hints(zero=3) and "
                'Workload(param_dtype="bfloat16")',
            )


def _is_plain(p: Tensor) -> bool:
    """Whether a parameter is a tensor as any, not one of a subclass that packs its values."""
    return type(p) in (nn.Parameter, Tensor) or isinstance(p, FakeTensor)
