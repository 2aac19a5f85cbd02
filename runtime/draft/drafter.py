"""What a drafter is: its capabilities as data, what it is made of, and what a step asks of it."""

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
    """What a drafter needs and does, as data.

    ``reads_aux_hidden``: it wants the target's aux hidden states of every committed token.
    ``samples``: its drafts are draws from a distribution; such a drafter needs an acceptance
    rule that knows the distribution, and the loop here refuses it.
    ``needs_weights``: a checkpoint of its own stands behind it.
    ``passes``: a model that runs once a level, once for all of them, or no model.
    ``branches``: it can propose trees, not chains alone.
    ``gives_probabilities``: it says before a step how likely its drafts are, so that a policy
    weighs this proposal and not only those before it.
    ``needs_host``: it reads the tokens on the host, so that no step of it starts before the one in
    front has ended.
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
    """Proposes tokens. Whatever it proposes, the output is that of decoding without it.

    It serves one generation at a time: sequences are told apart by their index, which begins at 0
    in each.
    """

    @property
    def capabilities(self) -> DrafterCapabilities:
        """What it needs and does."""
        ...

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        """The target committed more tokens: ``aux_hidden`` [n, aux_layers·H], None if not wanted.

        The token after each of these rows is known when this is called.
        """
        ...

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        """Trees below each sequence's root, no deeper than the engine's limit."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done, or its generation was closed."""
        ...


@runtime_checkable
class CachingDrafter(Drafter, Protocol):
    """A drafter for which the engine caches keys and values."""

    @property
    def cache_groups(self) -> tuple[str, ...]:
        """The groups that hold what it has taken up of a sequence, of each model one."""
        ...


class HostDrafter(Drafter, HostProposer, Protocol):
    """A drafter that proposes on the host, without a model. It outlives a generation."""

    @property
    def statistics(self) -> Any:
        """An object whose fields :class:`HostMetric` names."""
        ...


@dataclass(frozen=True)
class DrafterParts:
    """What the drafter of an engine is made of; ``record`` is what the manifest says of it."""

    executor: Executor
    manifest: Manifest
    counter: SlotCounter
    record: DrafterRecord


@dataclass(frozen=True)
class DrafterKind:
    """Drafters of one ``kind`` of the manifest: what they can do, and how one is made.

    The capabilities' name is the kind.
    """

    capabilities: DrafterCapabilities
    make: Callable[[DrafterParts], Drafter]

    @property
    def name(self) -> str:
        """What ``--drafter`` and the manifest call it."""
        return self.capabilities.name


@dataclass(frozen=True)
class HostMetric:
    """A Prometheus metric that reads ``field`` of a host drafter's statistics.

    It is a counter, or a gauge where ``is_gauge``; ``description`` is its help text.
    """

    name: str
    field: str
    description: str
    is_gauge: bool = False


@dataclass(frozen=True)
class HostDrafterKind:
    """As :class:`DrafterKind`, of drafters whose record is all that they are made of."""

    capabilities: DrafterCapabilities
    open: Callable[[Any], HostDrafter]
    metrics: tuple[HostMetric, ...] = ()

    @property
    def name(self) -> str:
        """What ``--drafter`` and the manifest call it."""
        return self.capabilities.name

    def make(self, parts: DrafterParts) -> HostDrafter:
        """The drafter of ``parts.record``."""
        return self.open(parts.record)
