"""The places of cache pools on the device, and where a launch leaves a changed pool.

A plugin declares to TensorRT that it overwrites a pool, which then has one place. An engine of
standard ops computes a new pool from the old one. TensorRT permits one address for both only if an
engine declares it (``get_aliased_input_tensor``). Scattered writes do not, since a kernel may read
what others have already written. Such a pool has two places, and every launch that writes it moves
it to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

POOL, OUT = "_pool", ".out"


class Pools:
    """Every pool by name. ``allocate`` returns a place of a size; errors state the name."""

    def __init__(self, allocate: Callable[[int, str], int], *, in_place: bool) -> None:
        self._allocate = allocate
        self._count = 1 if in_place else 2
        self._places: dict[str, tuple[int, ...]] = {}
        self._sides: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Allocate a place for a pool that does not exist yet."""
        if name not in self._places:
            what = f"the cache pool {name}"
            self._places[name] = tuple(self._allocate(nbytes, what) for _ in range(self._count))
            self._sides[name] = 0

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Return the places at which a launch reads these pools, and writes their outputs."""
        at = {}
        for name in names:
            places, side = self._places[name], self._sides[name]
            at[name] = places[side]
            at[name + OUT] = places[(side + 1) % self._count]
        return at

    def sides(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the current places of pools: a recorded graph is valid for one combination."""
        return tuple(self._sides[name] for name in names)

    def written(self, names: Iterable[str]) -> None:
        """Update the places of these pools after a launch that writes them was queued."""
        for name in names:
            self._sides[name] = (self._sides[name] + 1) % self._count


def pools_of(ports: Iterable[str]) -> tuple[str, ...]:
    """Return the pools among the inputs of a role."""
    return tuple(name for name in ports if name.endswith(POOL))


def written_pools(outputs: Iterable[str]) -> tuple[str, ...]:
    """Return the pools that a role with these outputs writes."""
    return tuple(name.removesuffix(OUT) for name in outputs if name.endswith(POOL + OUT))
