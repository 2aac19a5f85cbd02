"""What the manifest holds of a drafter, whatever its kind.

A :class:`ModelRecord` is a draft model: weights, a cache group and graphs of its own. A
:class:`HostRecord` proposes tokens on the host, without any of these. Each kind is one class in a
file beside this one; ``registry.py`` lists them.

An engine may hold several draft models. The first one's roles, weights and cache group have plain
names; those of another have its kind in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from specbuild.runtime.engine_dir.features import FeatureOf
from specbuild.runtime.engine_dir.geometry import MlaGeometry, Rope
from specbuild.runtime.engine_dir.port_forms import Form, Forms, floats, ints, launch_forms, written

# The roles of a draft: those that are models, and single ops.
DRAFT_MODEL_ROLES = ("draft_fuse", "draft")
DRAFT_ROLES = (*DRAFT_MODEL_ROLES, "expand", "select")
# The cache group of an engine's first draft model.
DRAFT_GROUP = "draft"

# What ``--draft`` takes for a draft model with a checkpoint of its own.
CHECKPOINT = "DRAFT"

Facts: TypeAlias = tuple[tuple[str, str], ...]


class DraftGeometry(Protocol):
    """The shape of a draft model: a frozen dataclass of each kind, with these members.

    ``latent_dims`` has the width of each layer's cached latent, and is empty where keys and values
    are cached. ``d2t_form`` is how the checkpoint maps draft tokens to the target's. ``dtype`` is
    how the engine stores the projections, None before it is built. ``sliding_window`` 0 is none.
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
        """Rows of the block that one pass drafts from, its root included; 0 without a block."""
        ...

    def block_rows(self, depth: int) -> int:
        """Rows of a block that drafts ``depth`` levels; 0 without a block."""
        ...

    def mask_rows(self, depth: int) -> int:
        """Mask rows that drafting ``depth`` levels adds to the rows that a pass ingests."""
        ...

    @property
    def window_obstacle(self) -> str | None:
        """What keeps ``--draft-window`` from bounding its attention, as a noun; None if nothing."""
        ...

    def facts(self) -> Facts:
        """Labels and texts for ``inspect``: the kind, and sizes that only some kinds have."""
        ...


class DraftDefaults:
    """Members of :class:`DraftGeometry` for a draft that runs level by level."""

    block: ClassVar[int] = 0
    mla: Any

    def block_rows(self, depth: int) -> int:  # noqa: ARG002
        """See :class:`DraftGeometry`."""
        return 0

    def mask_rows(self, depth: int) -> int:  # noqa: ARG002
        """See :class:`DraftGeometry`."""
        return 0

    @property
    def window_obstacle(self) -> str | None:
        """See :class:`DraftGeometry`."""
        return None if self.mla is None else "a draft with MLA"


@dataclass(frozen=True)
class PortContext:
    """What the ports of a draft's graphs depend on, beside its geometry.

    ``target_hidden`` is the target's width, ``group`` the draft's cache group. ``view`` are the
    inputs that place rows in the group's caches, ``pools`` its pools.
    """

    target_hidden: int
    group: str
    view: Forms
    pools: Forms


@dataclass(frozen=True, kw_only=True)
class DrafterRecord:
    """A drafter in the manifest: an open union of ``MEMBERS``, tagged by ``kind``.

    ``BUILD_ARGUMENT`` is the value of ``--draft`` that builds one, None where none does.
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
        """Labels and texts for ``inspect``."""
        return ()


@dataclass(frozen=True, kw_only=True)
class ModelRecord(DrafterRecord):
    """A draft model in an engine: its cache group, its shape, and the roles that only it has.

    ``roles`` are ``ROLES`` by the engine's names, empty in a CUDA engine, which has a plan in place
    of graphs. The first model's roles have plain names, those of another its cache group in front.
    """

    ROLES: ClassVar[tuple[str, ...]] = DRAFT_ROLES
    BUILD_ARGUMENT: ClassVar[str | None] = CHECKPOINT
    cache_group: str
    roles: tuple[str, ...]
    geometry: DraftGeometry

    def role(self, name: str) -> str:
        """The engine's name of one of ``ROLES``."""
        return own_name(self.cache_group, name)

    def ports(self, role: str, given: PortContext) -> tuple[Forms, Forms]:
        """The inputs that one of ``ROLES`` may take, and the outputs that it gives."""
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
        """Those of ``draft_fuse``: the target's states become hidden states of the draft."""
        return {"captured": self.aux_hidden(given)}, {"hidden": floats("T", self.geometry.hidden)}

    def draft_ports(self, given: PortContext) -> tuple[Forms, Forms]:
        """Those of ``draft``: it reads tokens and hidden states, and gives both of the next."""
        hidden = floats("T", self.geometry.hidden)
        inputs = launch_forms() | {"hidden": hidden} | given.view | given.pools
        outputs = {"draft_logits": floats("R", self.geometry.vocab), "hidden_out": hidden}
        return inputs, outputs | written(given.pools)

    def aux_hidden(self, given: PortContext) -> Form:
        """The target's states of a draft's layers, side by side."""
        return floats("T", len(self.geometry.aux_layers) * given.target_hidden)


@dataclass(frozen=True, kw_only=True)
class HostRecord(DrafterRecord):
    """A drafter that proposes chains on the host, without weights, roles or caches.

    Each kind has fields for its settings. One is ``max_tokens``, which bounds its proposals.
    """

    cache_group: ClassVar[None] = None
    roles: ClassVar[tuple[str, ...]] = ()
    geometry: ClassVar[None] = None

    if TYPE_CHECKING:

        @property
        def max_tokens(self) -> int: ...

    def problem(self) -> str | None:
        """What is wrong with its settings, as a sentence that follows its place; None if nothing.

        ``max_tokens`` is checked against the engine's limits elsewhere.
        """
        return None


def group_names(kind: str) -> FeatureOf:
    """The cache groups that a draft model of this kind may have: the first one's, or its own."""
    return {DRAFT_GROUP: None, kind: "draft_models"}


def own_name(cache_group: str, name: str) -> str:
    """How an engine calls a role, or a weight, of the draft model with this cache group."""
    return name if cache_group == DRAFT_GROUP else f"{cache_group}.{name}"


def aux_layers_of(drafts: Sequence[DraftGeometry]) -> tuple[int, ...]:
    """The layers that the first of some drafts reads, and those that only others read."""
    found: tuple[int, ...] = ()
    for draft in drafts:
        more = dict.fromkeys(draft.aux_layers) if found else draft.aux_layers
        found += tuple(layer for layer in more if layer not in found)
    return found
