"""The programs that a parallel module keeps: one a set of shapes and modes, bounded, the longest unused goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Programs kept. A program holds a graph and no weights; what it costs is the time to make it again.
CACHE_SIZE = 16


@dataclass(frozen=True)
class CacheEntry:
    """What a kept program is for: the ``shapes`` of the batch's tensors, whether for ``training``, and in how many
    forwards it was used."""

    shapes: tuple[tuple[int, ...], ...]
    training: bool
    uses: int = 0


@dataclass
class Cache(Generic[T]):
    """At most ``CACHE_SIZE`` programs by key."""

    kept: OrderedDict[Hashable, tuple[CacheEntry, T]] = field(default_factory=OrderedDict)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache[T]:
        """A copy of a module (an average of its parameters, say) runs the same programs: they hold no weights."""
        return Cache(self.kept.copy())

    def take(self, key: Hashable, entry: CacheEntry, make: Callable[[], T]) -> T:
        """The program for ``key``, made if there is none; counted as used. ``entry`` says what it is for."""
        entry, program = self.kept.pop(key) if key in self.kept else (entry, make())
        self.kept[key] = (replace(entry, uses=entry.uses + 1), program)
        if len(self.kept) > CACHE_SIZE:
            self.kept.popitem(last=False)
        return program

    def entries(self) -> tuple[CacheEntry, ...]:
        """What is kept, the longest unused first."""
        return tuple(entry for entry, _ in self.kept.values())
