"""Weights of a model on the meta device, made as one process would make them while each rank keeps only its pieces.

Initialisation draws from one stream of random numbers, so every rank must run all of it; but only what is being written
needs memory. `_Pager` watches every operation: a parameter gets memory when it is written, and gives it back, after the
rank's piece has been copied out of it, when others are. What an operation reads after that was needed whole: then all
is done again with that parameter kept. Vectors are small and always stay.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from autopar._compat import OpOverload, TorchDispatchMode, pytree
from autopar.capture.hf import is_transformers_model
from autopar.capture.hf_weights import initialize_in_place, rebuild
from autopar.errors import CaptureError
from autopar.runtime.heap import trim
from autopar.runtime.parameters import Pieces, layouts_of
from autopar.runtime.process import agree
from autopar.sharding.layout import Layout, Mesh

#: Bytes of parameters that keep their memory at a time, besides the one being written.
RESIDENT = 16 * 2**20

#: In-place operators that overwrite ``self`` without reading it.
_OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_", "cauchy_",
               "log_normal_", "geometric_"}  # fmt: skip
#: Operators that ask a tensor only for its shape and dtype.
_SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
               "new_zeros", "new_ones", "new_full", "new_empty_strided"}  # fmt: skip


class _Reread(Exception):
    """An operation needs the whole of a parameter whose memory was given back."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class _Slot:
    """One parameter: its place in the order of registration, its memory, and the piece copied out of it."""

    def __init__(self, place: int, parameter: Tensor) -> None:
        self.place, self.parameter = place, parameter
        self.storage = parameter.untyped_storage()
        self.bytes = self.storage.nbytes()
        self.piece: Tensor | None = None


class _Pager(TorchDispatchMode):
    """Gives memory to parameters while they are written. ``cut(place, parameter)`` copies this rank's piece out of a
    whole parameter (None: it has none); parameters at the places ``pinned`` keep their memory."""

    def __init__(self, cut: Callable[[int, Tensor], Tensor | None], pinned: set[int]) -> None:
        super().__init__()
        self.cut, self.pinned, self.cutting = cut, pinned, False
        self.slots: dict[int, _Slot] = {}  # by the identity of the storage
        self.resident: dict[int, _Slot] = {}  # the longest unused first

    def admit(self, parameter: Tensor) -> None:
        """Watch a parameter from now on; it has its memory."""
        key = _key(parameter)
        if key not in self.slots and not parameter.is_meta:
            slot = self.slots[key] = _Slot(len(self.slots), parameter)
            if slot.place not in self.pinned:
                self.resident[key] = slot
                self._make_room(key)

    def piece(self, parameter: Tensor) -> Tensor | None:
        """The rank's piece of a parameter whose memory was taken; None if it is still whole."""
        slot = self.slots.get(_key(parameter))
        return slot.piece if slot is not None and self._is_out(slot) else None

    def place(self, parameter: Tensor) -> int | None:
        """The parameter's place in the order in which they were admitted."""
        slot = self.slots.get(_key(parameter))
        return None if slot is None else slot.place

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not self.cutting and not func.is_view and name not in _SHAPE_ONLY:
            written = args[0] if args and name in _OVERWRITES else None
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and (slot := self.slots.get(_key(tensor))) is not None:
                    self._touch(slot, tensor, overwrite=tensor is written)
        return func(*args, **kwargs)

    def _touch(self, slot: _Slot, tensor: Tensor, overwrite: bool) -> None:
        """Before an operation on a parameter, or on a view of it: it must have its memory."""
        if slot.place in self.pinned:
            return
        if self._is_out(slot):
            if not overwrite or tensor.numel() * tensor.element_size() != slot.bytes:
                raise _Reread(slot.place)
            slot.storage.resize_(slot.bytes)
            slot.piece = None
        key = _key(tensor)
        self.resident.pop(key, None)
        self.resident[key] = slot
        self._make_room(key)

    def _is_out(self, slot: _Slot) -> bool:
        return slot.storage.nbytes() < slot.bytes

    def _make_room(self, current: int) -> None:
        """Take the memory of the longest unused parameters but the ``current`` one."""
        held = sum(slot.bytes for slot in self.resident.values())
        for key in list(self.resident):
            if held <= RESIDENT or key == current:
                return
            slot = self.resident.pop(key)
            self.cutting = True
            slot.piece = self.cut(slot.place, slot.parameter)
            self.cutting = False
            slot.storage.resize_(0)
            held -= slot.bytes
            trim()


def _key(tensor: Tensor) -> int:
    """The identity of a tensor's storage, shared by its views and by other tensors on it."""
    return tensor.untyped_storage()._cdata


def initialize(
    model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, rank: int, seed: int | None = None
) -> Pieces:
    """``rank``'s pieces of the parameters in ``layouts``, and all buffers, of a meta model that initialises itself with
    ``seed``, by default that of rank 0 (``torch.initial_seed()``; every rank must ask).

    A transformers model gets, bit for bit, the weights that ``torch.manual_seed(seed)`` and ``from_config`` give in one
    process; if it is not as its config makes it any more (a layer exchanged), those of its ``init_weights``. Of other
    models every module runs its ``reset_parameters``, children first, as constructors do. Host memory: the pieces, the
    largest parameter and `RESIDENT`. CaptureError if a module with tensors of its own cannot initialise itself.
    """
    drawn: int = agree(torch.initial_seed()) if seed is None else seed
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if is_transformers_model(model):
            found = _restarting(lambda pinned: _rebuilt(model, layouts, mesh, rank, drawn, pinned))
            if found is not None:
                return found
        made = _restarting(lambda pinned: _reset(model, layouts, mesh, rank, drawn, pinned))
    assert made is not None
    return made


def _restarting(run: Callable[[set[int]], Pieces | None]) -> Pieces | None:
    """Run until no parameter is read whose memory was given back."""
    pinned: set[int] = set()
    while True:
        try:
            return run(pinned)
        except _Reread as needed:
            pinned.add(needed.place)


def _cutter(names: Mapping[int, str], layouts: Mapping[str, Layout], mesh: Mesh, rank: int,
            model: nn.Module) -> Callable[[int, Tensor], Tensor | None]:  # fmt: skip
    """Copies this rank's piece out of the whole parameter of a place, in the dtype that the model has it in."""

    def cut(place: int, parameter: Tensor) -> Tensor | None:
        name = names.get(place)
        if name is None or name not in layouts:
            return None
        return own_piece(parameter, layouts[name], mesh, rank, model.get_parameter(name).dtype)

    return cut


def own_piece(whole: Tensor, layout: Layout, mesh: Mesh, rank: int, dtype: torch.dtype) -> Tensor:
    """A rank's piece of a whole tensor, contiguous, in memory of its own."""
    piece = layout.local_slice(mesh, whole.detach(), rank)
    return piece.to(dtype, copy=True, memory_format=torch.contiguous_format)


@contextlib.contextmanager
def _registrations(admit: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``admit`` with every matrix that a module of this process registers as a parameter."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.dim() > 1:
            admit(parameter)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _places(model: nn.Module) -> dict[int, str]:
    """Names of the parameters by the order in which the constructors register them, tried out on the meta device."""
    order: dict[int, int] = {}
    kept: list[Tensor] = []  # alive, so that an identity is not given twice

    def admit(parameter: Tensor) -> None:
        order.setdefault(id(parameter), len(order))
        kept.append(parameter)

    with _registrations(admit), torch.device("meta"):
        made = rebuild(model)
    return {order[id(p)]: name for name, p in made.named_parameters() if id(p) in order}


def _rebuilt(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, rank: int, seed: int,
             pinned: set[int]) -> Pieces | None:  # fmt: skip
    """Pieces of a transformers model that is constructed again; None if its config gives another model by now."""
    names = _places(model)
    pager = _Pager(_cutter(names, layouts, mesh, rank, model), pinned)
    torch.manual_seed(seed)
    with _registrations(pager.admit), pager:
        made = rebuild(model)
    shapes = [[(n, t.shape) for n, t in (*m.named_parameters(), *m.named_buffers())] for m in (model, made)]
    if shapes[0] != shapes[1]:
        return None
    places = {name: pager.place(p) for name, p in made.named_parameters()}
    if any(place is not None and names.get(place) != name for name, place in places.items()):
        return None  # constructors that go another way on the meta device
    buffers = dict(model.named_buffers())
    found = {n: b.detach().to(buffers[n].dtype) for n, b in made.named_buffers()}
    return Pieces(_pieces(made, model, pager, layouts, mesh, rank), found)


def _pieces(made: nn.Module, model: nn.Module, pager: _Pager, layouts: Mapping[str, Layout], mesh: Mesh,
            rank: int) -> dict[str, Tensor]:  # fmt: skip
    """The pieces of what was made: copied out already, or still whole. ``model`` says in which dtype."""
    found: dict[str, Tensor] = {}
    for name, p in made.named_parameters():
        if name in layouts:
            piece = pager.piece(p)
            if piece is None:
                piece = own_piece(p, layouts[name], mesh, rank, model.get_parameter(name).dtype)
            found[name] = piece
    return found


def _reset(model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, rank: int, seed: int,
           pinned: set[int]) -> Pieces:  # fmt: skip
    """Pieces of a model whose modules initialise themselves one after the other."""
    names = dict(enumerate(name for name, p in model.named_parameters() if p.dim() > 1))
    pager = _Pager(_cutter(names, layouts, mesh, rank, model), pinned)
    memo: dict[int, object] = {}  # deepcopy alone would keep tensors on meta, and to_empty would untie what is tied
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            memo[id(tensor)] = _empty_on_host(tensor)
    whole = copy.deepcopy(model, memo)
    for p in whole.parameters():
        if p.dim() > 1:
            pager.admit(p)
    torch.manual_seed(seed)
    with pager:
        if is_transformers_model(whole):
            initialize_in_place(whole)
        else:
            _reset_modules(whole)
    buffers = {n: b.detach() for n, b in whole.named_buffers()}
    return Pieces(_pieces(whole, model, pager, layouts, mesh, rank), buffers)


def _empty_on_host(tensor: Tensor) -> Tensor:
    """Memory that holds nothing yet, for a parameter or buffer on the meta device."""
    empty = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _reset_modules(model: nn.Module) -> None:
    """Every module's ``reset_parameters``, children first. CaptureError for one that owns tensors and has none."""
    for name, module in _children_first(model, "", set()):
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            raise CaptureError(
                f"module {name or '(root)'} is on the meta device and cannot initialise itself",
                expected="a reset_parameters method on every module that owns tensors",
                found=f"{type(module).__name__} without one",
                change="add reset_parameters, or build the model with real weights",
            )


def _children_first(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules with their names in the order in which constructors end, each once."""
    if id(module) not in seen:
        seen.add(id(module))
        for child_name, child in module.named_children():
            yield from _children_first(child, f"{name}.{child_name}".removeprefix("."), seen)
        yield name, module


def materialize(model: nn.Module) -> nn.Module:
    """A copy of a meta model with all its weights in this process, initialised as `initialize` does."""
    mesh = Mesh((("dp", 1),))
    pieces = initialize(model, layouts_of(model, {}), mesh, 0)
    memo: dict[int, object] = {}
    for name, p in model.named_parameters():
        memo[id(p)] = nn.Parameter(pieces.parameters[name], requires_grad=p.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = pieces.buffers[name]
    return copy.deepcopy(model, memo)
