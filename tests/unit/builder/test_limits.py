"""Sizes of an engine: defaults, limits, and errors with values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import write_draft, write_target
from dflash_drafts import write_dflash
from engine_sizes import compute_engine_sizes
from geometries import GPT_OSS_20B
from hypothesis import assume, given
from hypothesis import strategies as st

from specbuild.builder.backends.cuda.check import batch_warnings, require_one_view
from specbuild.builder.backends.cuda.step.programs import draft_shapes
from specbuild.builder.backends.registry import backend_of
from specbuild.builder.engine import sizes
from specbuild.builder.engine.draft_window import context_warnings, windowed_draft
from specbuild.builder.engine.dsa import dsa_of, dsa_warnings
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.inputs import BuildInputs
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import IndexerGeometry, TargetGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

Geometries = tuple[TargetGeometry, Eagle3Geometry]


@pytest.fixture(scope="module")
def geometries(tmp_path_factory: pytest.TempPathFactory) -> Geometries:
    path = tmp_path_factory.mktemp("limits")
    write_target(path / "t")
    write_draft(path / "d")
    target = read_target(path / "t", strict=True).geometry
    return target, read_draft(path / "d", target, strict=False).geometry


def asked_for(**values: Any) -> BuildOptions:
    return BuildOptions.from_flat(model=Path("m"), output=Path("o"), **values)


def test_limits_without_options(geometries: Geometries) -> None:
    engine_sizes = compute_engine_sizes(asked_for(), *geometries)
    shape = (
        engine_sizes.limits.draft_top_k,
        engine_sizes.limits.draft_depth,
        engine_sizes.limits.draft_tokens,
    )
    assert shape == (8, 8, 60)
    assert engine_sizes.draft_default == DraftShape(1, 3, 3)


def test_host_proposals_do_not_change_the_steps_of_the_draft(geometries: Geometries) -> None:
    target, draft = geometries
    options = asked_for(backend="cuda", drafter="suffix", suffix_max_tokens=20)
    engine_sizes = compute_engine_sizes(options, target, draft)
    assert engine_sizes.limits.draft_tokens == 20
    assert draft_shapes(engine_sizes.model_shapes["draft"])[-1] == DraftShape(1, 4, 4)
    require_one_view(engine_sizes)
    with pytest.raises(SpecbuildError, match="with DSA cannot verify host proposals"):
        require_one_view(replace(engine_sizes, dsa=SimpleNamespace()))
    alone = compute_engine_sizes(options, target, None)
    assert alone.model_shapes == {} and alone.draft_default == DraftShape(1, 20, 20)


def test_each_draft_has_its_own_largest_shape(geometries: Geometries, tmp_path: Path) -> None:
    """The limits cover all drafts; a block has as many levels as rows after its root."""
    target, draft = geometries
    write_dflash(tmp_path)
    block = replace(read_draft(tmp_path, target, strict=True).geometry, block_size=3)
    backend = backend_of("cuda")
    drafts = {"draft": draft, "dflash": block}
    engine_sizes = sizes.compute_engine_sizes(
        asked_for(backend="cuda"), backend.sizes, target, drafts
    )
    assert engine_sizes.model_shapes == {
        "draft": DraftShape(1, 4, 4),
        "dflash": DraftShape(1, 2, 2),
    }
    assert (engine_sizes.limits.draft_depth, engine_sizes.limits.draft_block) == (4, 3)
    assert [group.name for group in engine_sizes.groups][-2:] == ["draft", "dflash"]
    require_one_view(engine_sizes)
    for mode, name in (("specpv", "SpecPV"), ("dsa", "DSA")):
        lossy = replace(engine_sizes, **{mode: SimpleNamespace()})
        with pytest.raises(SpecbuildError, match=f"got 2 drafts, but CUDA engines with {name}"):
            require_one_view(lossy)
        require_one_view(replace(lossy, model_shapes={"draft": DraftShape(1, 4, 4)}))


def test_the_requested_shape_is_limit_and_default(geometries: Geometries) -> None:
    options = asked_for(draft_top_k=2, draft_depth=3, draft_tokens=6)
    engine_sizes = compute_engine_sizes(options, *geometries)
    assert engine_sizes.draft_default == DraftShape(2, 3, 6)
    assert engine_sizes.limits.draft_tokens == 6


@given(
    top_k=st.none() | st.integers(1, 4),
    depth=st.none() | st.integers(1, 9),
    tokens=st.none() | st.integers(1, 20),
    max_seq_len=st.integers(2, 64),
)
def test_a_gpu_engine_has_steps_for_its_default_draft(
    geometries: Geometries,
    top_k: int | None,
    depth: int | None,
    tokens: int | None,
    max_seq_len: int,
) -> None:
    changes = {"draft_top_k": top_k, "draft_depth": depth, "draft_tokens": tokens}
    options = asked_for(backend="cuda", max_seq_len=max_seq_len, **changes)
    try:
        engine_sizes = compute_engine_sizes(options, *geometries)
    except SpecbuildError:
        assume(False)
    limits = engine_sizes.limits
    assert engine_sizes.draft_default in draft_shapes(limits)
    assert limits.draft_top_k > 1 or limits.draft_depth == limits.draft_tokens
    for shape in draft_shapes(limits):
        assert shape.draft_depth <= limits.draft_depth
        assert shape.draft_tokens <= limits.draft_tokens


@pytest.mark.parametrize(
    ("changes", "depth"),
    [
        ({"draft_top_k": 1}, 4),
        ({"draft_top_k": 1, "draft_tokens": 7}, 7),
        ({"draft_top_k": 1, "draft_depth": 6}, 6),
        ({"draft_top_k": 1, "draft_depth": 6, "draft_tokens": 2}, 2),
    ],
)
def test_the_default_chain_on_a_gpu_is_short(
    geometries: Geometries, changes: dict[str, int], depth: int
) -> None:
    engine_sizes = compute_engine_sizes(asked_for(backend="cuda", **changes), *geometries)
    assert engine_sizes.draft_default == DraftShape(1, depth, depth)


@pytest.mark.parametrize(
    ("batch", "changes", "together"),
    [
        (32, {"draft_top_k": 1, "draft_depth": 7}, None),
        (32, {"draft_top_k": 1, "draft_depth": 8}, 16),
        (51, {"draft_top_k": 1}, 32),
        (4, {"draft_top_k": 8, "draft_tokens": 60}, None),
        (8, {"draft_top_k": 8, "draft_tokens": 60}, 4),
        (64, {}, None),
    ],
)
def test_warns_of_a_draft_that_few_sequences_can_verify_together(
    geometries: Geometries, batch: int, changes: dict[str, int], together: int | None
) -> None:
    options = asked_for(backend="cuda", max_batch_size=batch, **changes)
    engine_sizes = compute_engine_sizes(options, *geometries)
    warnings, rows = batch_warnings(engine_sizes), engine_sizes.limits.draft_tokens + 1
    if together is None:
        assert warnings == () and (not changes or batch * rows <= 256)
    else:
        assert together * rows <= 256 < 2 * together * rows
        assert f"only {together} of {batch} sequences can draft at once" in warnings[0]
    assert all(
        backend_of(name).check_engine_sizes(engine_sizes) == () for name in ("cpu", "tensorrt")
    )


def test_no_warning_of_drafts_without_a_draft(geometries: Geometries) -> None:
    engine_sizes = compute_engine_sizes(
        asked_for(backend="cuda", max_batch_size=64), geometries[0], None
    )
    assert batch_warnings(engine_sizes) == ()


def test_groups_cover_every_layer_once(geometries: Geometries) -> None:
    engine_sizes = compute_engine_sizes(asked_for(), *geometries)
    layers = sorted(layer for group in engine_sizes.target_groups for layer in group.layers)
    assert layers == list(range(geometries[0].layers))
    assert [engine_sizes.groups[i].name for i in engine_sizes.group_of_layer(geometries[0])] == [
        "sliding" if kind == "sliding_attention" else "full" for kind in geometries[0].layer_types
    ]


def test_window_layers_do_not_reserve_the_full_context(geometries: Geometries) -> None:
    """Reserving the full context would double the memory of the cache."""
    target = replace(geometries[0], max_positions=131072)
    options = asked_for(max_seq_len=131072, max_batch_size=1)
    pages = {
        group.name: group.pages for group in compute_engine_sizes(options, target, None).groups
    }
    assert pages["sliding"] * 100 < pages["full"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 0}, "--max-seq-len is 0"),
        ({"max_batch_size": -1}, "--max-batch-size is -1"),
        ({"page_size": 0}, "--page-size is 0"),
        ({"draft_depth": 0}, "--draft-depth is 0"),
        ({"max_seq_len": 513}, "exceeds the model's 512 positions"),
        ({"draft_top_k": 2, "draft_depth": 2, "draft_tokens": 7}, "candidate pool of 6"),
        ({"draft_tokens": 60, "max_seq_len": 32}, "does not fit a sequence of 32"),
    ],
)
def test_rejects_invalid_values(
    geometries: Geometries, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        compute_engine_sizes(asked_for(**changes), *geometries)


def test_draft_options_need_a_draft(geometries: Geometries) -> None:
    with pytest.raises(SpecbuildError, match="--draft-depth needs a draft"):
        compute_engine_sizes(asked_for(draft_depth=2), geometries[0], None)


def test_the_number_of_candidates_counts_all_levels() -> None:
    for k in range(1, 5):
        for depth in range(1, 5):
            levels = [k] + [k * k] * (depth - 1)
            assert DraftShape(k, depth, 1).candidates == sum(levels)


def test_warns_of_a_draft_beyond_its_trained_context(geometries: Geometries) -> None:
    """A published draft reached 2.3 tokens a step at 2k and 1.09 at 16k; a window avoids that."""
    draft = replace(geometries[1], max_positions=256)
    limits = compute_engine_sizes(asked_for(), geometries[0], draft).limits
    [warning] = context_warnings(draft, limits)
    assert "trained on 256 positions, the engine allows 512" in warning
    assert "--draft-window 256" in warning
    windowed = windowed_draft(draft, asked_for(draft_window=256))
    assert windowed.sliding_window == 256
    assert context_warnings(windowed, limits) == ()
    assert context_warnings(replace(draft, max_positions=512), limits) == ()


def test_a_draft_window_bounds_the_pages_of_the_draft(geometries: Geometries) -> None:
    target = replace(geometries[0], max_positions=131072)
    options = asked_for(max_seq_len=131072, max_batch_size=1, draft_window=64)
    pages = (
        compute_engine_sizes(options, target, windowed_draft(geometries[1], options))
        .groups[-1]
        .pages
    )
    everything = compute_engine_sizes(options, target, geometries[1]).groups[-1].pages
    assert pages * 50 < everything


def test_rejects_a_wider_draft_window(geometries: Geometries) -> None:
    draft = replace(geometries[1], sliding_window=32)
    with pytest.raises(SpecbuildError, match="wider than the draft's own window of 32"):
        windowed_draft(draft, asked_for(draft_window=64))


def test_default_limits_fit_a_short_context(geometries: Geometries) -> None:
    engine_sizes = compute_engine_sizes(asked_for(max_seq_len=24), *geometries)
    assert engine_sizes.limits.draft_tokens == 23


def test_rejects_more_children_than_draft_tokens(geometries: Geometries) -> None:
    small = replace(geometries[1], vocab=4)
    limits = compute_engine_sizes(asked_for(), geometries[0], small).limits
    assert limits.draft_top_k == 4
    assert limits.draft_tokens <= DraftShape(4, limits.draft_depth, 0).candidates
    with pytest.raises(SpecbuildError, match="--draft-top-k 5 exceeds the draft's vocabulary of 4"):
        compute_engine_sizes(asked_for(draft_top_k=5), geometries[0], small)


@pytest.mark.parametrize("max_seq_len", [2, 3, 4, 16])
def test_default_shape_stays_within_the_limits(geometries: Geometries, max_seq_len: int) -> None:
    engine_sizes = compute_engine_sizes(asked_for(max_seq_len=max_seq_len), *geometries)
    assert engine_sizes.draft_default is not None
    assert engine_sizes.draft_default.draft_tokens <= engine_sizes.limits.draft_tokens < max_seq_len
    assert engine_sizes.draft_default.draft_depth == engine_sizes.draft_default.draft_tokens


def test_a_gpu_engine_drafts_short_chains_over_larger_bf16_pages(geometries: Geometries) -> None:
    engine_sizes = compute_engine_sizes(asked_for(backend="cuda"), *geometries)
    limits = engine_sizes.limits
    assert (limits.draft_top_k, limits.draft_depth, limits.draft_tokens) == (1, 4, 4)
    assert engine_sizes.draft_default == DraftShape(1, 3, 3)
    for group in engine_sizes.groups:
        assert (group.page_size, group.dtype) == (64, "bfloat16")
        assert group.pool_axes == ("pages", "kv_heads", "page_size", "width")


def test_a_gpu_engine_uses_a_requested_tree(geometries: Geometries) -> None:
    options = asked_for(backend="cuda", draft_top_k=3, draft_depth=4, draft_tokens=12)
    engine_sizes = compute_engine_sizes(options, *geometries)
    assert engine_sizes.draft_default == DraftShape(3, 4, 12)


@pytest.mark.parametrize("page_size", [8, 48])
def test_rejects_page_sizes_that_kernels_do_not_support(
    geometries: Geometries, page_size: int
) -> None:
    with pytest.raises(SpecbuildError, match=f"--page-size {page_size}: .* powers of two from 16"):
        compute_engine_sizes(asked_for(backend="cuda", page_size=page_size), *geometries)


def test_a_window_equal_to_that_of_the_draft_changes_nothing(geometries) -> None:
    draft = replace(geometries[1], sliding_window=32)
    assert windowed_draft(draft, asked_for(draft_window=32)) == draft


def test_a_sequence_has_space_for_the_draft_and_its_root(geometries) -> None:
    sizes = {"draft_top_k": 1, "draft_depth": 8, "draft_tokens": 8}
    with pytest.raises(SpecbuildError, match="a draft of 8 tokens does not fit a sequence of 8"):
        compute_engine_sizes(asked_for(**sizes, max_seq_len=8), *geometries)
    longer = asked_for(**sizes, max_seq_len=9)
    assert compute_engine_sizes(longer, *geometries).limits.draft_tokens == 8


def test_a_step_on_a_gpu_has_256_rows() -> None:
    options = asked_for(backend="cuda", max_batch_size=256)
    assert compute_engine_sizes(options, GPT_OSS_20B, None).limits.max_batch_size == 256
    with pytest.raises(SpecbuildError, match=r"--max-batch-size 257: .* at most 256 rows"):
        compute_engine_sizes(asked_for(backend="cuda", max_batch_size=257), GPT_OSS_20B, None)


INDEXED = replace(GPT_OSS_20B, indexer=IndexerGeometry((1,), 1, 32, False, None, None))


def test_recent_tokens_cover_a_draft_and_its_root() -> None:
    shape = DraftShape(1, 8, 8)
    build_options = asked_for(dsa=True, dsa_recent_tokens=8)
    with pytest.raises(
        SpecbuildError, match=r"--dsa-recent-tokens 8 does not cover a draft of depth 8 .* to 9"
    ):
        dsa_of(build_options, INDEXED, shape, max_seq_len=16384)
    enough = dsa_of(asked_for(dsa=True, dsa_recent_tokens=9), INDEXED, shape, max_seq_len=16384)
    assert enough is not None and enough.recent_tokens == 9


def test_full_agreement_may_be_requested() -> None:
    build_options = asked_for(dsa=True, dsa_min_agreement=1.0)
    config = dsa_of(build_options, INDEXED, DraftShape(0, 0, 0), max_seq_len=16384)
    assert config is not None and config.min_agreement == 1


def test_warns_of_a_threshold_that_no_sequence_reaches() -> None:
    build_options = asked_for(dsa_threshold=4096)
    for max_seq_len, num_warnings in ((4096, 1), (4097, 0)):
        config = dsa_of(build_options, INDEXED, DraftShape(0, 0, 0), max_seq_len=max_seq_len)
        assert len(dsa_warnings(config, max_seq_len=max_seq_len)) == num_warnings


def test_the_shortest_sequence_has_two_tokens() -> None:
    with pytest.raises(SpecbuildError, match="1 has no capacity for a prompt and an output"):
        compute_engine_sizes(asked_for(max_seq_len=1), GPT_OSS_20B, None)
    assert compute_engine_sizes(asked_for(max_seq_len=2), GPT_OSS_20B, None).limits.max_seq_len == 2


def test_reports_a_context_that_is_reduced_by_default(target_path: Path) -> None:
    inputs = BuildInputs(
        target=SimpleNamespace(geometry=SimpleNamespace(max_positions=131072)),
        drafts=(),
        engine_sizes=SimpleNamespace(limits=SimpleNamespace(max_seq_len=4096)),
        sources=SimpleNamespace(converted=()),
    )
    options = BuildOptions(model=target_path, output=target_path)
    (note,) = inputs.notes(options)
    assert "4096 tokens; the model supports 131072" in note and "--max-seq-len" in note
    assert not inputs.notes(replace(options, limits=LimitOptions(max_seq_len=4096)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch_size": 99999999999999999999}, "--max-batch-size is 9+; .* at most 2147483647"),
        ({"page_size": 2**31}, "--page-size is 2147483648; .* at most 2147483647"),
        ({"kv_pages": 1 << 70}, "--kv-pages is [0-9]+; .* at most 2147483647"),
        ({"draft_window": 1 << 70}, "--draft-window is [0-9]+; .* at most 2147483647"),
        ({"draft_depth": 1 << 70}, "--draft-depth is [0-9]+; .* at most 2147483647"),
        # Each is allowed alone, but their product is not.
        ({"max_batch_size": 2**31 - 1}, "--max-batch-size 2147483647 with sequences of 512 tokens"),
        ({"page_size": 2**31 - 1}, "the largest cache would hold [0-9]+ tokens"),
    ],
)
def test_rejects_sizes_beyond_32_bits(
    geometries: Geometries, values: dict[str, int], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        compute_engine_sizes(asked_for(**values), *geometries)


@pytest.mark.parametrize("text", ["9999999999GiB", "9" * 400, "9" * 400 + "TiB"])
def test_rejects_memory_beyond_64_bits(text: str) -> None:
    with pytest.raises(SpecbuildError, match=f"--kv-memory {text} is more than 8 EiB"):
        LimitOptions.from_given({"kv_memory": text})
