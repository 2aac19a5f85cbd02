"""The sizes of an engine: limits, the default draft shape, and the cache groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specbuild.builder.engine.backend_sizes import BackendSizes, holding
from specbuild.builder.engine.draft_shapes import largest_shapes
from specbuild.builder.engine.dsa import dsa_of
from specbuild.builder.engine.host_drafter import (
    holding_chains,
    host_drafter_of,
    longest_host_chain,
)
from specbuild.builder.engine.pool_sizes import PoolBudget, state_groups
from specbuild.builder.engine.specpv import PAGE_SIZE as SPECPV_PAGE_SIZE
from specbuild.builder.engine.specpv import require_full_step_rows, specpv_of
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.runtime.cache.layout import KV_DTYPE, MIN_PAGE_SIZE
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.cache_groups import (
    FULL_GROUP,
    LATENT_GROUP,
    choosing_group,
)
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry, HostRecord
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.geometry import IndexerGeometry, TargetGeometry
from specbuild.runtime.engine_dir.manifest import (
    FP8_DTYPE,
    INDEXER_GROUP,
    CacheGroup,
    DraftShape,
    Dsa,
    Limits,
    SpecPv,
    StateGroup,
)
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.lossy.specpv.state import ViewGeometry

DEFAULT_MAX_SEQ_LEN: int = LimitOptions.usual()["max_seq_len"]
# A prompt of one token, and one more.
MIN_SEQ_LEN = 2
DEFAULT_MAX_BATCH_SIZE: int = LimitOptions.usual()["max_batch_size"]


@dataclass(frozen=True)
class EngineSizes:
    """All sizes of an engine.

    ``model_shapes`` are the largest trees of the draft models, by cache group; ``limits`` also
    cover host chains of up to ``host_chain`` tokens: those of ``host_drafter``, or what guides
    force without one. ``states`` are the groups of recurrent states. ``ranks`` GPUs run the engine
    together.
    """

    limits: Limits
    draft_default: DraftShape | None
    groups: tuple[CacheGroup, ...]
    specpv: SpecPv | None = None
    dsa: Dsa | None = None
    budget: PoolBudget = field(default_factory=PoolBudget)
    adjusted_steps: bool = False
    ragged_steps: bool = False
    host_drafter: HostRecord | None = None
    host_chain: int = 0
    model_shapes: Mapping[str, DraftShape] = field(default_factory=dict)
    states: tuple[StateGroup, ...] = ()
    ranks: int = 1

    def group_of_layer(self, target: TargetGeometry) -> tuple[int, ...]:
        """The index in ``layer_groups`` of each target layer's group.

        It is the group of the keys and values that the layer reads, or of its state.
        """
        return tuple(
            next(
                i
                for i, group in enumerate(self.layer_groups)
                if group.name != INDEXER_GROUP and target.cache_layer(layer) in group.layers
            )
            for layer in range(target.layers)
        )

    @property
    def layer_groups(self) -> tuple[CacheGroup | StateGroup, ...]:
        """The groups of the target's layers."""
        return (*self.states, *self.target_groups)

    @property
    def indexer_group(self) -> CacheGroup | None:
        """The group of the indexers' keys, None without DSA."""
        return next((g for g in self.groups if g.name == INDEXER_GROUP), None)

    @property
    def views(self) -> ViewGeometry | None:
        """The sizes of SpecPV's views, None without."""
        if self.specpv is None:
            return None
        page_size = self.choosing_group.page_size
        return ViewGeometry(self.specpv, page_size, deepest=self.limits.draft_depth + 1)

    @property
    def choosing_group(self) -> CacheGroup:
        """The group whose keys select the blocks of SpecPV; only with SpecPV."""
        assert self.specpv is not None
        name = choosing_group(self.specpv)
        return next(group for group in self.groups if group.name == name)

    def draft_group(self, name: str) -> CacheGroup:
        """Return a draft's group."""
        return next(group for group in self.groups if group.name == name)

    def draft_caches(
        self, name: str, target_layers: tuple[int, ...]
    ) -> list[tuple[CacheGroup, int]]:
        """Return the caches that a draft reads, by layer: those of its group, or the target's."""
        if not target_layers:
            own = self.draft_group(name)
            return [(own, layer) for layer in own.layers]
        groups = [group for group in self.target_groups if group.name != INDEXER_GROUP]
        return [(g, layer) for layer in target_layers for g in groups if layer in g.layers]

    @property
    def target_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of the target's launches."""
        return tuple(group for group in self.groups if group.name not in DRAFT_GROUPS)


def compute_engine_sizes(
    options: BuildOptions,
    sizes: BackendSizes,
    target: TargetGeometry,
    drafts: Mapping[str, DraftGeometry],
) -> EngineSizes:
    """Compute every size; ``drafts`` are by cache group.

    Raises SpecbuildError with the values of an option that is out of range.
    """
    asked = options.limits
    LimitOptions.check_bounds(asked.given())
    DraftOptions.check_bounds({"window": options.drafting.window})
    max_seq_len = longest_sequence(asked.max_seq_len, target)
    require_seq_len(max_seq_len, target)
    batch = asked.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    usual = SPECPV_PAGE_SIZE if options.specpv.enabled else sizes.page_size
    page_size = asked.page_size or usual
    model_shapes, default = largest_shapes(options, sizes, drafts, max_seq_len)
    host_drafter = host_drafter_of(options, max_seq_len=max_seq_len)
    shape = holding(model_shapes.values())
    # Guides check tokens afterwards, which recurrent states do not allow, nor do lossy modes.
    checks_guides = not (options.specpv.enabled or target.indexer or target.gated_delta)
    longest = longest_host_chain(
        shape,
        host_drafter,
        guide_chain=sizes.guide_chain if checks_guides else 0,
        max_seq_len=max_seq_len,
    )
    shape = holding_chains(shape, longest)
    if default is None and host_drafter is not None:
        default = shape
    if sizes.decode_rows is not None:
        _require_kernel_sizes(sizes.decode_rows, batch, page_size, shape)
    if shape.draft_tokens >= max_seq_len:
        raise SpecbuildError(
            f"a draft of {shape.draft_tokens} tokens does not fit a sequence of {max_seq_len}; "
            "raise --max-seq-len or ask for fewer --draft-tokens"
            f"{'' if host_drafter is None else f' or --{host_drafter.kind}-max-tokens'}"
        )
    specpv = specpv_of(
        options,
        target,
        shape,
        page_size=page_size,
        max_seq_len=max_seq_len,
        one_form=sizes.one_form,
    )
    if specpv is not None and sizes.decode_rows is not None:
        bucket = 1 << (batch - 1).bit_length()
        require_full_step_rows(specpv, shape, batch=bucket, most_rows=sizes.decode_rows)
    reverified = 0 if specpv is None else specpv.n_spec_tokens_buf
    rows = max(sizes.prefill_rows, batch * (reverified + shape.draft_tokens + 1))
    limits = Limits(
        max_seq_len=max_seq_len,
        max_batch_size=batch,
        max_rows=rows,
        draft_top_k=shape.draft_top_k,
        draft_depth=shape.draft_depth,
        draft_tokens=shape.draft_tokens,
        draft_block=max((draft.block for draft in drafts.values()), default=0),
    )
    groups = _target_groups(target, page_size, sizes)
    dsa = dsa_of(options, target, shape, max_seq_len=max_seq_len)
    if target.indexer is not None:
        group = _indexer_group(target, target.indexer, page_size, sizes)
        if dsa is not None and dsa.key_dtype == "fp8" and group.dtype == KV_DTYPE:
            group = replace(group, dtype=FP8_DTYPE)
        groups.append(group)
    for name, draft in drafts.items():
        window = draft.sliding_window
        layers = tuple(range(draft.cached_layers))
        group = _group(name, layers, draft, window=window, page_size=page_size, sizes=sizes)
        if draft.latent_dims:
            group = replace(_latent_group(group, draft.latent_dims), name=name)
        groups.append(group)
    if asked.kv_dtype is not None:
        groups = [_coded(group) for group in groups]
    places = 1 if facts_of(options.backend).pools_in_place else 2
    budget = PoolBudget(asked.kv_memory, asked.kv_pages, places, options.ranks)
    states = state_groups(target, limits, sizes.cache_dtype)
    engine_sizes = EngineSizes(
        limits,
        default,
        tuple(groups),
        specpv,
        dsa,
        budget,
        host_drafter=host_drafter,
        host_chain=longest,
        model_shapes=model_shapes,
        states=states,
        ranks=options.ranks,
    )
    return with_limits(engine_sizes, limits)


def longest_sequence(asked: int | None, target: TargetGeometry) -> int:
    """``--max-seq-len``, or its default for this target."""
    return asked or min(target.max_positions, DEFAULT_MAX_SEQ_LEN)


def require_seq_len(max_seq_len: int, target: TargetGeometry) -> None:
    """Raise SpecbuildError if a sequence cannot have this length, or the model is too short."""
    if max_seq_len < MIN_SEQ_LEN:
        raise SpecbuildError(
            f"--max-seq-len {max_seq_len} has no capacity for a prompt and an output of one token "
            f"each; ask for {MIN_SEQ_LEN} to {target.max_positions}"
        )
    if max_seq_len > target.max_positions:
        raise SpecbuildError(
            f"--max-seq-len {max_seq_len} exceeds the model's {target.max_positions} positions; "
            f"ask for at most {target.max_positions}"
        )


def require_rows(option: str, asked: int, rows: int, most_rows: int) -> None:
    """Raise SpecbuildError if ``option`` makes steps with more rows than a backend supports."""
    if rows > most_rows:
        raise SpecbuildError(
            f"--{option} {asked}: a step of a CUDA engine has at most {most_rows} rows; ask for "
            "less"
        )


def _require_kernel_sizes(most_rows: int, batch: int, page_size: int, shape: DraftShape) -> None:
    if page_size < MIN_PAGE_SIZE or page_size & (page_size - 1):
        raise SpecbuildError(
            f"--page-size {page_size}: CUDA kernels take powers of two from {MIN_PAGE_SIZE} on"
        )
    require_rows("max-batch-size", batch, batch, most_rows)
    require_rows("draft-tokens", shape.draft_tokens, shape.draft_tokens + 1, most_rows)


def with_limits(engine_sizes: EngineSizes, limits: Limits) -> EngineSizes:
    """Return the sizes with these limits; its caches follow from them, within the budget."""
    groups = engine_sizes.budget.sized(engine_sizes.groups, limits, engine_sizes.specpv)
    return replace(engine_sizes, limits=limits, groups=groups)


def _target_groups(target: TargetGeometry, page_size: int, sizes: BackendSizes) -> list[CacheGroup]:
    groups = []
    dims = target.latent_dims or (0,) * target.layers
    for name, layer_type in ((FULL_GROUP, "full_attention"), ("sliding", "sliding_attention")):
        window = target.sliding_window if name == "sliding" else 0
        layers = [i for i in target.caching_layers if target.layer_types[i] == layer_type]
        plain = tuple(i for i in layers if not dims[i])
        latent = tuple(i for i in layers if dims[i])
        if plain:
            groups.append(
                _group(name, plain, target, window=window, page_size=page_size, sizes=sizes)
            )
        if latent:
            group = _group(name, latent, target, window=window, page_size=page_size, sizes=sizes)
            groups.append(_latent_group(group, tuple(dims[i] for i in latent)))
    return groups


def _coded(group: CacheGroup) -> CacheGroup:
    """Return the group with quantized keys and values; keys of indexers have their own option."""
    if group.name == INDEXER_GROUP:
        return group
    if group.latent_widths:
        raise SpecbuildError(
            f"--kv-dtype fp8 stores keys and values, but the cache group {group.name} holds "
            "latents; leave it out, or build with --no-mla where the latents came later"
        )
    return replace(group, dtype=FP8_DTYPE)


def _latent_group(group: CacheGroup, widths: tuple[int, ...]) -> CacheGroup:
    """Return the group with a pool per layer, of these widths: ``latent``, ``latent_sliding``."""
    widest = max(widths)
    return replace(
        group,
        name=f"{LATENT_GROUP}_sliding" if group.window else LATENT_GROUP,
        kv_heads=1,
        k_width=widest,
        v_width=widest,
        latent_widths=widths,
    )


def _indexer_group(
    target: TargetGeometry, indexer: IndexerGeometry, page_size: int, sizes: BackendSizes
) -> CacheGroup:
    """Return the group of indexers' keys, one per token and layer, with pages as their layers'."""
    group = _group(
        INDEXER_GROUP, indexer.layers, target, window=0, page_size=page_size, sizes=sizes
    )
    return replace(
        group,
        kv_heads=1,
        k_width=indexer.width,
        v_width=indexer.width,
        latent_widths=(indexer.width,) * len(indexer.layers),
    )


def _group(
    name: str,
    layers: tuple[int, ...],
    model: TargetGeometry | DraftGeometry,
    *,
    window: int,
    page_size: int,
    sizes: BackendSizes,
) -> CacheGroup:
    heads = model.heads_of(layers[0]) if isinstance(model, TargetGeometry) else model
    return CacheGroup(
        name=name,
        layers=layers,
        kv_heads=heads.kv_heads,
        k_width=heads.head_dim,
        v_width=heads.head_dim,
        page_size=page_size,
        pages=0,
        window=window,
        dtype=sizes.cache_dtype,
        pool_axes=sizes.pool_axes,
    )
