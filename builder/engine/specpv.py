"""The SpecPV settings of a build: defaults and checks."""

from __future__ import annotations

from dataclasses import asdict

from specbuild.builder.options import BuildOptions, SpecPvOptions
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape, SpecPv
from specbuild.runtime.errors import SpecbuildError

DEFAULTS = SpecPv(**SpecPvOptions.usual())
PAGE_SIZE = 16


def specpv_of(
    options: BuildOptions,
    target: TargetGeometry,
    shape: DraftShape,
    *,
    page_size: int,
    max_seq_len: int,
    one_form: bool = False,
) -> SpecPv | None:
    """Return the settings of the options, None without ``--specpv``; may raise SpecbuildError.

    ``one_form``: layers of one kind must cache either latents or keys and values.
    """
    given = options.specpv.given()
    if not given.pop("enabled", False):
        if given:
            raise SpecbuildError(f"{SpecPvOptions.flag(next(iter(given)))} needs --specpv; add it")
        return None
    margin = shape.draft_depth + 1
    needed = shape.draft_tokens + 1 + margin
    ample = max(DEFAULTS.n_spec_tokens_buf, needed + 3 * margin)
    config = SpecPv(**{**asdict(DEFAULTS), "n_spec_tokens_buf": ample, **given})
    SpecPvOptions.check_bounds(given)
    if "full_attention" not in target.layer_types:
        raise SpecbuildError("--specpv: the model has no full-attention layer; build without it")
    if target.linear_layers:
        raise SpecbuildError(
            f"--specpv: a {target.model_type} has {len(target.linear_layers)} layers with a "
            "recurrent state, of which no partial view can be taken; build without it"
        )
    if target.shared_caches:
        raise SpecbuildError(
            f"--specpv: a {target.model_type} has {target.shared_caches} layers that read keys and "
            "values of other layers, which no view is made for; build without it"
        )
    if config.score == "indexer":
        _check_indexers(target)
    else:
        _check_latents(target)
    if one_form:
        _check_forms(target)
    if config.block_size % page_size:
        raise SpecbuildError(
            f"--specpv-block-size {config.block_size} is no multiple of the page size {page_size}; "
            "a view is a table of pages: choose a --page-size that divides it"
        )
    if config.n_spec_tokens_buf < needed:
        raise SpecbuildError(
            f"--specpv-n-spec-tokens-buf {config.n_spec_tokens_buf} is too small: the draft's "
            f"{shape.draft_tokens} tokens, the root and a margin of {margin} (draft depth + 1) "
            f"need {needed}; raise it or lower --draft-tokens"
        )
    _check_threshold(config, max_seq_len)
    return config


def require_full_step_rows(
    config: SpecPv, shape: DraftShape, *, batch: int, most_rows: int
) -> None:
    """Raise SpecbuildError if sequences of a CUDA engine cannot take full steps in turn.

    A step has at most ``most_rows`` rows, including the trees of ``batch`` sequences. The rest
    limits how many sequences re-verify their buffers at once, and so how early the others must.
    """
    buffer, deepest = config.n_spec_tokens_buf, shape.draft_depth + 1
    spare = most_rows - batch * (shape.draft_tokens + 1)
    if spare < buffer:
        raise SpecbuildError(
            f"--specpv-n-spec-tokens-buf {buffer}: a step has at most {most_rows} rows, of which "
            f"{batch} sequences with trees of {shape.draft_tokens + 1} leave {spare}; lower it, "
            "--max-batch-size or --draft-tokens"
        )
    at_once = spare // buffer
    rounds = -(-batch // at_once)
    needed = shape.draft_tokens + 1 + (rounds + 1) * deepest
    if buffer < needed:
        raise SpecbuildError(
            f"--specpv-n-spec-tokens-buf {buffer} is too small for {batch} sequences: {at_once} at "
            f"a time have capacity for a full step, so that tokens of {rounds + 1} more steps must "
            f"fit a buffer, {needed} in all; raise it or lower --max-batch-size"
        )


def _check_forms(target: TargetGeometry) -> None:
    """Check that full steps of a CUDA engine re-verify one group with a window and one without."""
    for kind, named in (
        ("sliding_attention", "sliding-window"),
        ("full_attention", "full-attention"),
    ):
        layers = zip(target.latent_dims, target.layer_types, strict=False)
        if len({bool(dim) for dim, of_layer in layers if of_layer == kind}) > 1:
            raise SpecbuildError(
                f"--specpv: some {named} layers cache latents (mla_kv.safetensors) and some keys "
                "and values, CUDA engines take one of the two; retrofit all or none of them, or "
                "build with --no-mla or without --specpv"
            )


def _check_latents(target: TargetGeometry) -> None:
    """Layers with a window need no views, so their latents are no obstacle."""
    if target.mla is not None:
        raise SpecbuildError(
            f"--specpv: the {target.model_type}'s layers cache latents, and blocks are chosen by "
            "cached keys; build without --specpv"
        )
    latent = [
        layer
        for layer, dim in enumerate(target.latent_dims)
        if dim and target.layer_types[layer] == "full_attention"
    ]
    if latent:
        raise SpecbuildError(
            f"--specpv: full-attention layers {', '.join(map(str, latent))} cache latents "
            "(mla_kv.safetensors), and blocks are chosen by cached keys; choose them by indexers "
            "(--dsa --specpv-score indexer), or build with --no-mla or without --specpv"
        )


def _check_indexers(target: TargetGeometry) -> None:
    """Check that every layer with views has indexers, if these select the blocks."""
    full = {i for i, kind in enumerate(target.layer_types) if kind == "full_attention"}
    indexed = set(target.indexer.layers) if target.indexer else set()
    missing = sorted(full - indexed)
    if missing:
        raise SpecbuildError(
            f"--specpv-score indexer: full-attention layers {', '.join(map(str, missing))} have no "
            "indexer in use; add --dsa with indexers for all of them, or take dot or quest"
        )


def _check_threshold(config: SpecPv, max_seq_len: int) -> None:
    fixed = (config.n_sink_blocks + config.n_window_blocks) * config.block_size
    if config.partial_threshold < fixed:
        raise SpecbuildError(
            f"--specpv-partial-threshold {config.partial_threshold} lies below the {fixed} tokens "
            f"of {config.n_sink_blocks} sink and {config.n_window_blocks} window blocks of "
            f"{config.block_size}, which every view holds; raise it"
        )
    if config.partial_threshold >= max_seq_len:
        raise SpecbuildError(
            f"--specpv-partial-threshold {config.partial_threshold} is never passed: the engine's "
            f"longest sequence has {max_seq_len} tokens; raise --max-seq-len or lower it"
        )
