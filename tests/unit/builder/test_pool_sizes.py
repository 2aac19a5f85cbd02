"""Pools below the worst case: pages, bytes, and errors with values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_sizes import compute_engine_sizes
from geometries import GPT_OSS_20B
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.builder.engine.cache_capacity import cache_capacity
from specbuild.builder.engine.sizes import EngineSizes, with_limits
from specbuild.builder.option_readers import memory_size
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.geometry import IndexerGeometry, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

INDEXED = replace(GPT_OSS_20B, indexer=IndexerGeometry((1, 3), 4, 64, True, None, None))
# One slot of GPT-OSS-20B in bf16: K and V of 8 heads of 64, in 12 layers of each kind.
SLOT = 2 * 8 * 64 * 2 * 12


def planned(target: TargetGeometry = GPT_OSS_20B, **values: Any) -> EngineSizes:
    usual = {"backend": "cuda", "max_seq_len": 4096, "max_batch_size": 16}
    options = BuildOptions.from_flat(model=Path("m"), output=Path("o"), **usual | values)
    return compute_engine_sizes(options, target, None)


def pages_of(engine_sizes: EngineSizes) -> dict[str, int]:
    """Return the pages for sequences."""
    return {group.name: group.pages - 1 for group in engine_sizes.groups}


def bytes_of(engine_sizes: EngineSizes) -> int:
    """Return the bytes of the two groups of GPT-OSS-20B, including page 0."""
    return sum(group.pages * group.page_size * SLOT for group in engine_sizes.groups)


def test_pages_bound_layers_without_a_window() -> None:
    # 4096 tokens and one root in pages of 64
    assert pages_of(planned())["full"] == 16 * 65
    few = pages_of(planned(kv_pages=200))
    assert few == {**pages_of(planned()), "full": 200}
    assert pages_of(planned(kv_pages=10**9)) == pages_of(planned())
    assert pages_of(planned(INDEXED, max_seq_len=128, kv_pages=17))["indexer"] == 17


def test_the_sizes_in_the_documentation_of_the_server() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
    engine_sizes = planned(max_batch_size=64)
    full, sliding = (
        next(g for g in engine_sizes.groups if g.name == n) for n in ("full", "sliding")
    )
    assert (full.pages, full.page_size * SLOT) == (64 * 65 + 1, 1_572_864)
    sizes = [f"{group.pages * group.page_size * SLOT / 2**30:.1f} GiB" for group in (full, sliding)]
    assert f"1 572 864 bytes = {sizes[0]}, and {sizes[1]} for the windows" in page


@examples(30)
@given(extra=st.integers(0, 600 << 20))
def test_memory_is_assigned_to_windows_first(extra: int) -> None:
    rings = next(g for g in planned().groups if g.name == "sliding").pages * 64 * SLOT
    least = rings + 66 * 64 * SLOT
    engine_sizes = planned(kv_memory=least + extra)
    assert pages_of(engine_sizes)["full"] == min(65 + extra // (64 * SLOT), 16 * 65)
    assert pages_of(engine_sizes)["sliding"] == pages_of(planned())["sliding"]
    assert bytes_of(engine_sizes) <= least + extra


def test_rejects_memory_for_less_than_one_longest_sequence() -> None:
    with pytest.raises(
        SpecbuildError, match=r"--kv-pages 64: a sequence of 4096 tokens, .* 16, take 65"
    ):
        planned(kv_pages=64)
    least = bytes_of(planned(kv_pages=65))
    assert pages_of(planned(kv_memory=least))["full"] == 65
    with pytest.raises(SpecbuildError, match=r"--kv-memory of .* MiB: the caches of one sequence"):
        planned(kv_memory=least - 1)
    with pytest.raises(SpecbuildError, match="take 16; ask for as many"):
        planned(max_seq_len=64, kv_pages=15)
    with pytest.raises(SpecbuildError, match="give one"):
        planned(kv_memory=least, kv_pages=70)
    with pytest.raises(SpecbuildError, match="--kv-pages is 0"):
        planned(kv_pages=0)


def test_a_backend_that_changes_the_limits_respects_the_budget() -> None:
    engine_sizes = planned(kv_pages=70)
    larger = with_limits(
        engine_sizes, replace(engine_sizes.limits, max_rows=4 * engine_sizes.limits.max_rows)
    )
    assert pages_of(larger)["full"] == 70
    assert pages_of(larger)["sliding"] > pages_of(engine_sizes)["sliding"]


def test_the_number_of_concurrent_sequences() -> None:
    engine_sizes = planned(kv_pages=200)
    result = cache_capacity(engine_sizes.groups, engine_sizes.limits)
    assert (result.groups["full"].pages, result.groups["full"].tokens) == (200, 12800)
    # 1024 tokens and a root need 17 pages, 4096 need 65.
    assert {e.tokens: e.guaranteed_no_evict for e in result.sequences} == {1024: 11, 4096: 3}
    whole = planned()
    together = cache_capacity(whole.groups, whole.limits).sequences
    assert {entry.guaranteed_no_evict for entry in together} == {16}
    # Half of 4096 needs 33 pages, half of 1024 needs 9.
    assert {e.tokens: e.max_utilization for e in result.sequences} == {1024: 16, 4096: 6}
    lossy = cache_capacity(engine_sizes.groups, engine_sizes.limits, lossy=True).sequences
    assert [e.max_utilization for e in lossy] == [11, 3]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("500 MB", 5 * 10**8),
        ("1.5GiB", 3 << 29),
        ("4096", 4096),
        ("2tib", 2 << 40),
    ],
)
def test_parses_sizes(text: str, size: int) -> None:
    assert memory_size("--kv-memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 gigs", "-1GiB", "nanGiB", "infGiB", "0"])
def test_rejects_invalid_sizes(text: str) -> None:
    with pytest.raises(SpecbuildError, match="is not a size: write it as 4GiB"):
        memory_size("--kv-memory", text)
