"""The drafter protocols, and the declaration of each kind of drafter with its capabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from specbuild.runtime.cache.row_placement import SlotCounter
from specbuild.runtime.draft.host_proposal import HostProposer
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.drafters.record import DrafterRecord
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.executors.executor import Executor
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class DrafterCapabilities:
    """The requirements and abilities of a drafter.

    ``reads_aux_hidden``: it reads the target's aux hidden states of every committed token.
    ``samples``: its drafts are sampled. The decoder refuses such a drafter: its acceptance rule
    does not use the draft's distribution.
    ``needs_weights``: it has weights.
    ``passes``: its model runs once per level ("levels") or once per draft ("one"); "none" for a
    drafter without a model.
    ``branches``: it can propose trees as well as chains.
    ``gives_probabilities``: it estimates the acceptance of each proposal before the step.
    ``needs_host``: it reads tokens on the host, so a step starts only after the previous one ended.
    """

    name: str
    reads_aux_hidden: bool
    samples: bool = False
    needs_weights: bool = False
    passes: Literal["levels", "one", "none"] = "none"
    branches: bool = False
    gives_probabilities: bool = False
    needs_host: bool = True


class Drafter(Protocol):
    """Proposes tokens. Its proposals never change the output.

    A drafter serves one generation at a time. Sequences are identified by their index, which starts
    at 0 in each generation.
    """

    @property
    def capabilities(self) -> DrafterCapabilities:
        """Its requirements and abilities."""
        ...

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        """Observe n newly committed tokens of a sequence.

        ``aux_hidden`` [n, aux_layers·H] are their aux hidden states; None if the drafter does not
        read these. The sequence already holds the token after each of the n.
        """
        ...

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Return a tree below each sequence's root, within the engine's limits."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """Discard the state of a finished or closed sequence."""
        ...


@runtime_checkable
class CachingDrafter(Drafter, Protocol):
    """A drafter with cache groups in the engine."""

    @property
    def cache_groups(self) -> tuple[str, ...]:
        """The cache group of each of its models."""
        ...


class HostDrafter(Drafter, HostProposer, Protocol):
    """A drafter that proposes on the host, without a model. It is kept between generations."""

    @property
    def statistics(self) -> Any:
        """The counters that each :class:`HostMetric` reads by ``field``."""
        ...


@dataclass(frozen=True)
class DrafterParts:
    """The arguments that create a drafter; ``record`` is its entry in the manifest."""

    executor: Executor
    manifest: Manifest
    counter: SlotCounter
    record: DrafterRecord


@dataclass(frozen=True)
class DrafterKind:
    """The declaration of a kind of drafter: its capabilities, and the factory ``make``.

    ``capabilities.name`` is the name of the kind.
    """

    capabilities: DrafterCapabilities
    make: Callable[[DrafterParts], Drafter]

    @property
    def name(self) -> str:
        """The name in ``--drafter`` and in the manifest."""
        return self.capabilities.name


@dataclass(frozen=True)
class HostMetric:
    """A Prometheus metric that reads ``field`` of a host drafter's statistics.

    It is a gauge if ``is_gauge``, else a counter. ``description`` is its help text.
    """

    name: str
    field: str
    description: str
    is_gauge: bool = False


@dataclass(frozen=True)
class HostDrafterKind:
    """The declaration of a kind of host drafter.

    ``open`` creates a drafter from its record. ``make`` does the same from a :class:`DrafterParts`.
    """

    capabilities: DrafterCapabilities
    open: Callable[[Any], HostDrafter]
    metrics: tuple[HostMetric, ...] = ()

    @property
    def name(self) -> str:
        """The name in ``--drafter`` and in the manifest."""
        return self.capabilities.name

    def make(self, parts: DrafterParts) -> HostDrafter:
        """Create the drafter of ``parts.record``."""
        return self.open(parts.record)
