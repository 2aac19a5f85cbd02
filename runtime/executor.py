"""What the decoding loop asks of a backend: roles to run, and the cache pools behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class ExecutorCapabilities:
    """What an executor can do, as data.

    ``batch_invariant``: a row's result does not depend, bit for bit, on what shares its launch.
    ``device_resident_step``: runs a whole speculative step without the host.
    """

    name: str
    batch_invariant: bool
    device_resident_step: bool


class Executor(Protocol):
    """Runs an engine's graphs by role. It owns the KV pools and updates them in place."""

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """What this executor can do."""
        ...

    def prepare(self, roles: Sequence[str]) -> None:
        """Loads what these roles need, so that their first run is as fast as any."""
        ...

    def run(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of one role by name. ``feeds`` holds every input but the pools.

        The arrays returned stay valid until the same role runs again, and may be fed to it.
        """
        ...
