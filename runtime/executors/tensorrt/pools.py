"""Where the cache pools lie on the device, and where a launch that changes one leaves it.

Plugins tell TensorRT that they write a pool over itself: it has one place. An engine of standard
ops makes a new pool of the old one, and TensorRT allows one address for both only where an engine
says so itself (``get_aliased_input_tensor``), which scattered writes do not: its kernels may read
what others of them have already written. Such a pool has two places, and every launch that writes
it moves it to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

POOL, OUT = "_pool", ".out"


class Pools:
    """Every pool by name. ``allocate`` makes a place of a size, for what an error would name."""

    def __init__(self, allocate: Callable[[int, str], int], *, in_place: bool) -> None:
        self._allocate = allocate
        self._count = 1 if in_place else 2
        self._places: dict[str, tuple[int, ...]] = {}
        self._sides: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Makes a place for a pool that is not there yet."""
        if name not in self._places:
            what = f"the cache pool {name}"
            self._places[name] = tuple(self._allocate(nbytes, what) for _ in range(self._count))
            self._sides[name] = 0

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Where a launch reads these pools, and under their outputs' names where it writes them."""
        found = {}
        for name in names:
            places, side = self._places[name], self._sides[name]
            found[name] = places[side]
            found[name + OUT] = places[(side + 1) % self._count]
        return found

    def sides(self, names: Iterable[str]) -> tuple[int, ...]:
        """Which places these pools are at: what is recorded holds for one combination."""
        return tuple(self._sides[name] for name in names)

    def written(self, names: Iterable[str]) -> None:
        """A launch that writes these pools is queued: it leaves them where the next one reads."""
        for name in names:
            self._sides[name] = (self._sides[name] + 1) % self._count


def pools_of(ports: Iterable[str]) -> tuple[str, ...]:
    """The pools among the inputs of a role."""
    return tuple(name for name in ports if name.endswith(POOL))


def written_pools(outputs: Iterable[str]) -> tuple[str, ...]:
    """The pools that a role with these outputs writes."""
    return tuple(name.removesuffix(OUT) for name in outputs if name.endswith(POOL + OUT))
