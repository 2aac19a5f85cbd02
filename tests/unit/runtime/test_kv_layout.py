"""Cache groups in device memory: places, footprint, and layouts that do not fit a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from engine_sizes import compute_engine_sizes
from geometries import GPT_OSS_20B, gpt_oss_parts
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.options import BuildOptions, DsaOptions, LimitOptions
from specbuild.runtime.cache.layout import KvLayout, cache_bytes, layouts, validate_caches
from specbuild.runtime.device import pool_bytes
from specbuild.runtime.engine_dir.cache_groups import pages_per_sequence
from specbuild.runtime.engine_dir.geometry import IndexerGeometry, Rope, TargetGeometry
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits
from specbuild.runtime.errors import EngineFileError

AXES = ("pages", "kv_heads", "page_size", "width")
TARGET = TargetGeometry(
    model_type="gpt_oss",
    layers=4,
    hidden=64,
    vocab=256,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    layer_types=("sliding_attention", "full_attention") * 2,
    sliding_window=8,
    max_positions=512,
    rope=Rope(theta=1e4),
    eos_token_ids=(0,),
    **gpt_oss_parts(4),
)
LIMITS = Limits(
    max_seq_len=500,
    max_batch_size=2,
    max_rows=64,
    draft_top_k=1,
    draft_depth=4,
    draft_tokens=4,
)


def group(**changes: object) -> CacheGroup:
    plain = CacheGroup("full", (1, 3), 2, 16, 16, 64, 17, 0, "bfloat16", AXES)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_the_footprint_of_gpt_oss_20b() -> None:
    """24 576 bytes a context token: 12 layers, K and V, 8 heads of 64, bf16."""
    full = group(layers=tuple(range(1, 24, 2)), kv_heads=8, k_width=64, v_width=64, pages=2049)
    layout = KvLayout(full)
    assert layout.bytes_per_page == 64 * 24_576
    assert layout.bytes == 2049 * 64 * 24_576 == cache_bytes([full])


@given(
    layers=st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True),
    heads=st.integers(1, 8),
    width=st.sampled_from([16, 32, 64]),
    pages=st.integers(2, 50),
)
def test_pools_lie_side_by_side(layers: list[int], heads: int, width: int, pages: int) -> None:
    layout = KvLayout(
        group(layers=tuple(layers), kv_heads=heads, k_width=width, v_width=width, pages=pages)
    )
    assert [(p.layer, p.part) for p in layout.pools] == [(i, p) for i in layers for p in ("k", "v")]
    places = [*[pool.offset for pool in layout.pools], layout.bytes]
    assert places[0] == 0
    assert {b - a for a, b in pairwise(places)} == {2 * pages * heads * 64 * width}
    assert layout.stacks == ((0, (2 * len(layers), pages, heads, 64, width)),)


@given(widths=st.lists(st.sampled_from([16, 48, 64, 512]), min_size=1, max_size=8))
def test_latents_of_one_width_adjoin(widths: list[int]) -> None:
    layout = KvLayout(
        group(
            layers=tuple(range(len(widths))),
            kv_heads=1,
            k_width=max(widths),
            v_width=max(widths),
            latent_widths=tuple(widths),
        )
    )
    held = {pool.layer: pool for pool in layout.pools}
    assert {layer: pool.shape[3] for layer, pool in held.items()} == dict(enumerate(widths))
    ends = [pool.offset + 2 * 17 * 64 * pool.shape[3] for pool in layout.pools]
    assert [pool.offset for pool in layout.pools] == [0, *ends[:-1]]
    assert ends[-1] == layout.bytes == 17 * layout.bytes_per_page
    assert {shape[4]: shape[0] for _, shape in layout.stacks} == Counter(widths)
    offsets = {pool.offset for pool in layout.pools}
    assert {offset for offset, _ in layout.stacks} <= offsets


def test_rejects_latents_of_other_widths_than_the_model() -> None:
    latent = replace(TARGET, latent_dims=(0, 20, 0, 16))
    held = group(name="latent", kv_heads=1, k_width=32, v_width=32, latent_widths=(32, 16))
    sliding = group(name="sliding", layers=(0, 2), window=8)
    validate_caches([held, sliding], latent, {})
    with pytest.raises(EngineFileError, match=r"latent has heads and widths \(1, 16, 16\)"):
        validate_caches([replace(held, latent_widths=(16, 16))], latent, {})
    with pytest.raises(EngineFileError, match=r"its model has \(1, 16, 16\)"):
        validate_caches([held], replace(TARGET, latent_dims=(0, 16, 0, 16)), {})


@given(length=st.integers(1, 4096), rows=st.integers(1, 300), window=st.integers(1, 200))
def test_a_ring_keeps_the_window_of_every_row_of_a_launch(
    length: int, rows: int, window: int
) -> None:
    """Rows ``length …`` are written. Then the first of them still sees its window."""
    size, limits = 64, replace(LIMITS, max_seq_len=4096, max_rows=300)
    ring = pages_per_sequence("sliding", limits, tokens=4096, page_size=size, window=window)
    place = {}
    for slot in range(min(length + rows, 4096)):
        place[(slot // size) % ring, slot % size] = slot
    for slot in range(max(0, length - window + 1), min(length, 4096)):
        assert place[(slot // size) % ring, slot % size] == slot


def test_a_page_table_has_an_entry_for_every_slot() -> None:
    layout = layouts([group()])["full"]
    assert layout.logical_pages(LIMITS) * 64 >= LIMITS.max_seq_len + LIMITS.draft_tokens + 1
    assert layout.logical_pages(replace(LIMITS, max_seq_len=59)) == 1


def test_fp8_keys_of_indexers_need_half_the_memory() -> None:
    wide = group(name="indexer", kv_heads=1, latent_widths=(16,) * len(group().layers))
    narrow = replace(wide, dtype="float8_e4m3fn")
    layout = layouts([narrow])["indexer"]
    assert (layout.dtype, 2 * layout.bytes) == ("uint8", layouts([wide])["indexer"].bytes)
    places = [2 * pool.offset for pool in layout.pools]
    assert places == [pool.offset for pool in layouts([wide])["indexer"].pools]


def test_sound_caches_are_accepted() -> None:
    sliding = group(name="sliding", layers=(0, 2), window=8)
    for dtype in ("bfloat16", "float8_e4m3fn"):
        caches = [replace(of, dtype=dtype) for of in (group(), sliding)]
        validate_caches(caches, TARGET, {})


def test_rejects_latents_in_fp8() -> None:
    """No kernel reads them."""
    latents = group(name="latent", kv_heads=1, latent_widths=(16,) * len(group().layers))
    target = replace(TARGET, latent_dims=(16,) * TARGET.layers)
    validate_caches([latents], target, {})
    with pytest.raises(EngineFileError, match="holds float8_e4m3fn, but kernels need bfloat16"):
        validate_caches([replace(latents, dtype="float8_e4m3fn")], target, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, r"heads and widths \(3, 16, 16\), but its model has \(2, 16, 16\)"),
        ({"v_width": 8}, r"heads and widths \(2, 16, 8\)"),
        ({"page_size": 48}, "pages of 48 tokens"),
        ({"page_size": 8}, "pages of 8 tokens"),
        ({"dtype": "float32"}, "holds float32, but kernels need bfloat16"),
        ({"layers": (1, 7)}, r"layers \(1, 7\)"),
        ({"layers": (0, 1)}, "layers that are not full_attention"),
        ({"name": "draft"}, "the engine has no draft"),
    ],
)
def test_rejects_caches_of_another_model(changes: dict[str, object], message: str) -> None:
    with pytest.raises(EngineFileError, match=message):
        validate_caches([group(**changes)], TARGET, {})


def test_predicted_pools_equal_those_of_the_plan() -> None:
    target = replace(GPT_OSS_20B, indexer=IndexerGeometry((1, 3), 4, 64, True, None, None))
    for key_dtype in (None, "fp8"):
        options = BuildOptions(
            model=Path("m"),
            output=Path("o"),
            backend="cuda",
            dsa=DsaOptions(enabled=True, key_dtype=key_dtype),
            limits=LimitOptions(max_seq_len=16384),
        )
        for group in compute_engine_sizes(options, target, None).groups:
            assert pool_bytes(group) == KvLayout(group).bytes, (key_dtype, group.name)
