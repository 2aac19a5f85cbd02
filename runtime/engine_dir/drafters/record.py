"""The record of a drafter in the manifest: the base classes of all kinds.

A :class:`ModelRecord` describes a draft model, which has weights, a cache group and graphs. A
:class:`HostRecord` describes a drafter that proposes tokens on the host and has none of these. Each
kind is one class in a file of this folder; ``registry.py`` lists the classes.

An engine may have several draft models. The roles, weights and cache group of the first one have
plain names. Those of each further model have the model's kind as a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from specbuild.runtime.engine_dir.features import FeatureOf
from specbuild.runtime.engine_dir.geometry import MlaGeometry, Rope, TargetGeometry
from specbuild.runtime.engine_dir.port_forms import Form, Forms, floats, ints, launch_forms, written

# Roles of a draft that are graphs of the draft model.
DRAFT_MODEL_ROLES = ("draft_fuse", "draft")
# All roles of a draft; the further ones are graphs of a single op.
DRAFT_ROLES = (*DRAFT_MODEL_ROLES, "expand", "select")
# The cache group of an engine's first draft model.
DRAFT_GROUP = "draft"

# The placeholder in ``--draft DRAFT`` for a draft model with a separate checkpoint.
CHECKPOINT = "DRAFT"

Facts: TypeAlias = tuple[tuple[str, str], ...]


class DraftGeometry(Protocol):
    """The shape of a draft model. Each kind has a frozen dataclass with these members.

    ``latent_dims`` has the width of each layer's cached latent; it is empty if the draft caches
    keys and values. ``d2t_form`` is the form in which the checkpoint maps draft tokens to target
    tokens. ``dtype`` is the storage of the projections in the engine, None before the build. A
    ``sliding_window`` of 0 is no window.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def architecture(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def q_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_eps(self) -> float: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def aux_layers(self) -> tuple[int, ...]: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def layers(self) -> int: ...
    @property
    def mla(self) -> MlaGeometry | None: ...
    @property
    def latent_dims(self) -> tuple[int, ...]: ...
    @property
    def sliding_window(self) -> int: ...
    @property
    def d2t_form(self) -> str: ...
    @property
    def dtype(self) -> str | None: ...

    @property
    def block(self) -> int:
        """The levels that a block drafts, plus the root; 0 for a draft without blocks."""
        ...

    def block_rows(self, depth: int) -> int:
        """Return the number of rows of a block that drafts ``depth`` levels; 0 without blocks."""
        ...

    def mask_rows(self, depth: int) -> int:
        """Return the number of mask rows in a pass that drafts ``depth`` levels."""
        ...

    @property
    def window_rope(self) -> Rope:
        """The rotary embedding of layers with a sliding window."""
        ...

    @property
    def cached_layers(self) -> int:
        """The number of layers whose keys and values are in the draft's cache group."""
        ...

    def target_layers(self, target: TargetGeometry) -> tuple[int, ...]:
        """Return the layers of the target whose caches the draft reads; usually none."""
        ...

    def up_to(self, longest: int) -> DraftGeometry:
        """Return the geometry for sequences of up to this length."""
        ...

    @property
    def window_obstacle(self) -> str | None:
        """The draft as a noun phrase if ``--draft-window`` cannot apply to it, else None."""
        ...

    def facts(self) -> Facts:
        """Return labels and texts for ``inspect``: the kind, and sizes specific to it."""
        ...


class DraftDefaults:
    """Default members of :class:`DraftGeometry`, for a draft that runs level by level."""

    block: ClassVar[int] = 0
    mla: Any
    layers: Any
    rope: Any

    def block_rows(self, depth: int) -> int:  # noqa: ARG002
        """See :class:`DraftGeometry`."""
        return 0

    def mask_rows(self, depth: int) -> int:  # noqa: ARG002
        """See :class:`DraftGeometry`."""
        return 0

    @property
    def window_rope(self) -> Rope:
        """See :class:`DraftGeometry`."""
        rope: Rope = self.rope
        return rope

    @property
    def cached_layers(self) -> int:
        """See :class:`DraftGeometry`."""
        layers: int = self.layers
        return layers

    def target_layers(self, target: TargetGeometry) -> tuple[int, ...]:  # noqa: ARG002
        """See :class:`DraftGeometry`."""
        return ()

    def up_to(self, longest: int) -> Any:
        """See :class:`DraftGeometry`."""
        return replace(self, rope=self.rope.up_to(longest))  # type: ignore[type-var]

    @property
    def window_obstacle(self) -> str | None:
        """See :class:`DraftGeometry`."""
        return None if self.mla is None else "a draft with MLA"


@dataclass(frozen=True)
class PortContext:
    """The data, besides the draft's geometry, that define the ports of its graphs.

    ``target_hidden`` is the target's width and ``group`` the draft's cache group. ``view`` has the
    inputs that map rows to slots of the caches that the draft reads; ``pools`` has these caches.
    """

    target_hidden: int
    group: str
    view: Forms
    pools: Forms


@dataclass(frozen=True, kw_only=True)
class DrafterRecord:
    """A drafter in the manifest: a tagged union of the classes in ``MEMBERS``, by ``kind``.

    ``BUILD_ARGUMENT`` is the value of ``--draft`` that adds this kind to an engine; None if no
    value does.
    """

    MEMBERS: ClassVar[dict[str, type[DrafterRecord]]] = {}
    ROLES: ClassVar[tuple[str, ...]] = ()
    BUILD_ARGUMENT: ClassVar[str | None] = None
    kind: str = ""

    if TYPE_CHECKING:

        @property
        def cache_group(self) -> str | None: ...
        @property
        def roles(self) -> tuple[str, ...]: ...
        @property
        def geometry(self) -> DraftGeometry | None: ...

    def facts(self) -> Facts:
        """Return labels and texts for ``inspect``."""
        return ()


@dataclass(frozen=True, kw_only=True)
class ModelRecord(DrafterRecord):
    """A draft model in an engine: its cache group, its shape, and its roles.

    ``roles`` has the names of ``ROLES`` in this engine. The first model's roles have plain names;
    those of a further model have its cache group as a prefix. ``roles`` is empty in a CUDA engine,
    which has a plan instead of graphs.
    """

    ROLES: ClassVar[tuple[str, ...]] = DRAFT_ROLES
    BUILD_ARGUMENT: ClassVar[str | None] = CHECKPOINT
    cache_group: str
    roles: tuple[str, ...]
    geometry: DraftGeometry

    def role(self, name: str) -> str:
        """Return the name in this engine of a role in ``ROLES``."""
        return own_name(self.cache_group, name)

    def ports(self, role: str, given: PortContext) -> tuple[Forms, Forms]:
        """Return the possible inputs and the outputs of a role in ``ROLES``."""
        draft = self.geometry
        if role == "draft_fuse":
            return self.fuse_ports(given)
        if role == "draft":
            return self.draft_ports(given)
        if role == "expand":
            inputs = {"logits": floats("BF", draft.vocab), "score": floats("B", "F")}
            children = {"tokens": ints("B", "FK"), "scores": floats("B", "FK")}
            return inputs | {"top_k": ints()}, children | {"frontier": ints("B", "K")}
        inputs = {"tokens": ints("B", "M"), "parents": ints("B", "M")}
        inputs |= {"scores": floats("B", "M"), "draft_tokens": ints()}
        trees = {n: ints("B", "N") for n in ("tree_tokens", "tree_parents", "depths")}
        return inputs, trees | {"ancestor_bits": ints("B", "N", "W"), "count": ints("B")}

    def fuse_ports(self, given: PortContext) -> tuple[Forms, Forms]:
        """Return the ports of ``draft_fuse``, from target states to draft hidden states."""
        return {"captured": self.aux_hidden(given)}, {"hidden": floats("T", self.geometry.hidden)}

    def draft_ports(self, given: PortContext) -> tuple[Forms, Forms]:
        """Return the ports of ``draft``: tokens and states in, next logits and states out."""
        hidden = floats("T", self.geometry.hidden)
        inputs = launch_forms() | {"hidden": hidden} | given.view | given.pools
        outputs = {"draft_logits": floats("R", self.geometry.vocab), "hidden_out": hidden}
        return inputs, outputs | written(given.pools)

    def aux_hidden(self, given: PortContext) -> Form:
        """Return the form of the concatenated target states that the draft reads."""
        return floats("T", len(self.geometry.aux_layers) * given.target_hidden)


@dataclass(frozen=True, kw_only=True)
class HostRecord(DrafterRecord):
    """A drafter that proposes chains on the host, without weights, roles or caches.

    Each kind has fields for its settings. All have ``max_tokens``, the length limit of proposals.
    """

    cache_group: ClassVar[None] = None
    roles: ClassVar[tuple[str, ...]] = ()
    geometry: ClassVar[None] = None

    if TYPE_CHECKING:

        @property
        def max_tokens(self) -> int: ...

    def problem(self) -> str | None:
        """Return the first invalid setting as the end of an error message; None if all are valid.

        The check of ``max_tokens`` against the engine's limits is in ``manifest_check.py``.
        """
        return None


def group_names(kind: str) -> FeatureOf:
    """Return the cache groups of this kind: as the first draft model, and as a further one."""
    return {DRAFT_GROUP: None, kind: "draft_models"}


def own_name(cache_group: str, name: str) -> str:
    """Return the engine's name of a role or weight of the draft model with this cache group."""
    return name if cache_group == DRAFT_GROUP else f"{cache_group}.{name}"


def aux_layers_of(drafts: Sequence[DraftGeometry]) -> tuple[int, ...]:
    """Return the aux layers of the first draft, then the further ones of the other drafts."""
    layers: tuple[int, ...] = ()
    for draft in drafts:
        candidates = dict.fromkeys(draft.aux_layers) if layers else draft.aux_layers
        layers += tuple(layer for layer in candidates if layer not in layers)
    return layers
