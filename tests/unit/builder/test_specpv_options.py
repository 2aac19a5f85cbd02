"""SpecPV's options: every violated invariant is an error with its values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_sizes import compute_engine_sizes
from geometries import GPT_OSS_20B

from specbuild.builder.engine.specpv import require_full_step_rows, specpv_of
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.manifest import DraftShape, SpecPv
from specbuild.runtime.errors import SpecbuildError


def options(**changes: Any) -> BuildOptions:
    arguments = {"specpv": True, "max_seq_len": 16384, **changes}
    return BuildOptions.from_flat(model=Path("m"), output=Path("o"), **arguments)


def test_defaults_equal_the_published_values() -> None:
    engine_sizes = compute_engine_sizes(options(), GPT_OSS_20B, None)
    assert engine_sizes.specpv == SpecPv(16, 2, 256, 8, 64, 4096, 32, "mean", "dot")
    assert {group.page_size for group in engine_sizes.groups} == {16}
    assert engine_sizes.views is not None
    # Sink, retrieved blocks, then the window with an incomplete block, one token, and the buffer.
    assert engine_sizes.views.entries == 2 + 256 + -(-(9 * 16 - 1 + 1 + 64) // 16)


def test_without_the_flag_nothing_changes() -> None:
    assert compute_engine_sizes(options(specpv=False), GPT_OSS_20B, None).specpv is None


def test_launches_have_rows_for_reverified_tokens() -> None:
    """Every sequence of a batch may run a full step at the same time."""
    engine_sizes = compute_engine_sizes(
        options(max_batch_size=9, specpv_n_spec_tokens_buf=100), GPT_OSS_20B, None
    )
    assert engine_sizes.limits.max_rows == 9 * (100 + 1)
    sliding = next(group for group in engine_sizes.groups if group.window)
    assert sliding.pages - 1 >= 9 * (engine_sizes.limits.max_rows + sliding.window - 1) // 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"specpv": False, "specpv_block_size": 16}, "block-size needs --specpv"),
        ({"specpv_block_size": 24}, "block-size 24 is no multiple of the page size 16"),
        ({"page_size": 64}, "block-size 16 is no multiple of the page size 64"),
        ({"specpv_n_spec_tokens_buf": 1}, "buf 1 is too small.* 0 tokens.* margin of 1 .* need 2"),
        ({"specpv_partial_threshold": 100}, "100 lies below the 160 tokens of 2 sink and 8 window"),
        ({"max_seq_len": 4096}, "threshold 4096 is never passed.* 4096 tokens"),
        ({"specpv_n_retrieval_blocks": 0}, "retrieval-blocks is 0; it must be at least 1"),
        ({"specpv_full_refresh_interval": -1}, "refresh-interval is -1; it must be at least 0"),
    ],
)
def test_a_violated_invariant_is_an_error_with_its_values(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        compute_engine_sizes(options(**changes), GPT_OSS_20B, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 200}, "at most 256 rows, of which 256 sequences with trees of 1 leave"),
        (
            {"max_batch_size": 128, "specpv_n_spec_tokens_buf": 60},
            "too small for 128 sequences: 2 at a time .* 65 more steps .*, 66 in all",
        ),
    ],
)
def test_full_steps_alternate_between_sequences_on_a_gpu(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        compute_engine_sizes(options(backend="cuda", **changes), GPT_OSS_20B, None)


def test_rejects_views_without_layers_that_cache_keys() -> None:
    full = [i for i, kind in enumerate(GPT_OSS_20B.layer_types) if kind == "full_attention"]
    dims = tuple(64 if i in (0, full[1], full[4]) else 0 for i in range(GPT_OSS_20B.layers))
    latent = replace(GPT_OSS_20B, latent_dims=dims)
    named = f"layers {full[1]}, {full[4]} cache latents.*--no-mla or without --specpv"
    with pytest.raises(SpecbuildError, match=named):
        compute_engine_sizes(options(), latent, None)
    assert compute_engine_sizes(options(specpv=False), latent, None).specpv is None
    windowed = tuple(0 if i in full else 64 for i in range(GPT_OSS_20B.layers))
    some = replace(GPT_OSS_20B, latent_dims=(*windowed[:4], *(0,) * (GPT_OSS_20B.layers - 4)))
    for backend in ("cpu", "cuda"):
        every = replace(GPT_OSS_20B, latent_dims=windowed)
        assert compute_engine_sizes(options(backend=backend), every, None).specpv is not None
    assert compute_engine_sizes(options(), some, None).specpv is not None
    with pytest.raises(SpecbuildError, match="retrofit all or none"):
        compute_engine_sizes(options(backend="cuda"), some, None)


def test_the_defaults_support_alternating_eight_sequences() -> None:
    engine_sizes = compute_engine_sizes(
        options(backend="cuda", max_batch_size=8), GPT_OSS_20B, None
    )
    assert engine_sizes.specpv is not None and engine_sizes.specpv.n_spec_tokens_buf == 64


def test_rejects_a_model_without_full_attention() -> None:
    sliding = replace(GPT_OSS_20B, layer_types=("sliding_attention",) * GPT_OSS_20B.layers)
    with pytest.raises(SpecbuildError, match="no full-attention layer"):
        compute_engine_sizes(options(), sliding, None)


def test_the_default_buffer_fits_three_more_steps_of_a_large_tree() -> None:
    shape = DraftShape(8, 8, 60)
    specpv = specpv_of(options(), GPT_OSS_20B, shape, page_size=16, max_seq_len=16384)
    assert specpv is not None and specpv.n_spec_tokens_buf == 60 + 1 + 4 * 9


def test_a_remainder_of_sequences_needs_one_more_full_step() -> None:
    """With seven of 16 sequences at a time, four more steps must fit into a buffer."""
    build_options = options(specpv_n_spec_tokens_buf=30)
    shape = DraftShape(1, 4, 4)
    specpv = specpv_of(build_options, GPT_OSS_20B, shape, page_size=16, max_seq_len=16384)
    assert specpv is not None
    require_full_step_rows(
        replace(specpv, n_spec_tokens_buf=25), shape, batch=16, most_rows=80 + 7 * 25
    )
    with pytest.raises(
        SpecbuildError, match=r"7 at a time .* tokens of 4 more steps .*, 25 in all"
    ):
        require_full_step_rows(
            replace(specpv, n_spec_tokens_buf=24), shape, batch=16, most_rows=80 + 7 * 24
        )
