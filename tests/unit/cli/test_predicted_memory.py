"""Predicted memory against explicit arithmetic."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from rich.console import Console

from specbuild.builder.engine.cache_capacity import cache_capacity
from specbuild.cli.options.page_bytes import PageOptions
from specbuild.cli.tables.cache_tables import cache_tables, footprint
from specbuild.cli.tables.predicted_memory import as_built_for, predict_memory
from specbuild.cli.terminal.console import size_text
from specbuild.runtime.engine_dir.manifest import (
    Manifest,
    SpecPv,
    StateGroup,
    StoredTensor,
)
from specbuild.runtime.engine_dir.plan import Buffer, Plan
from specbuild.runtime.errors import SpecbuildError

MakeManifest = Callable[..., Manifest]
# one page of one layer: 2 heads, K and V of 8 floats, 4 slots
PAGE_BYTES = 2 * (8 + 8) * 4 * 4


def test_memory_at_the_limits_of_the_engine(make_manifest: MakeManifest) -> None:
    memory = predict_memory(make_manifest())
    assert memory.weights_bytes == 5000
    assert memory.kv_bytes == {"full": 45 * PAGE_BYTES, "sliding": 23 * PAGE_BYTES}
    # logits of 2 × 21 rows, auxiliary hidden states of 32 rows and 3 layers
    assert memory.outputs_bytes == 4 * (42 * 100 + 32 * 3 * 16)
    parts = memory.weights_bytes + sum(memory.kv_bytes.values()) + memory.outputs_bytes
    assert memory.total_bytes == parts


def test_tensorrt_rtx_engines_store_each_pool_twice(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    one, two = (
        predict_memory(replace(manifest, backend=backend)).kv_bytes
        for backend in ("tensorrt", "tensorrt-rtx")
    )
    assert two == {name: 2 * held for name, held in one.items()}


def test_recurrent_states_of_cuda_engines_include_the_factors_of_a_step(
    make_manifest: MakeManifest,
) -> None:
    """Use the sizes of Qwen3.5-27B: 16 sequences with chains of 4."""
    states = StateGroup(
        "recurrent", layers=tuple(range(48)), slots=18, heads=48, key_width=128, value_width=128,
        channels=10240, tail=3, row_width=10336, dtype="bfloat16",
    )  # fmt: skip
    manifest = make_manifest()
    limits = replace(manifest.limits, max_batch_size=16, draft_tokens=4)
    manifest = replace(manifest, limits=limits, state_groups=(states,))
    state, inputs = 48 * 128 * 128 * 4, 10240 * 2
    # δ for 48 value heads, k for 16 key heads, and e^g for each value head
    factors = (48 * 128 + 16 * 128 + 48) * 4
    lazy = 48 * (state + (3 + 5) * inputs + 5 * factors)
    memory = predict_memory(replace(manifest, backend="cuda"))
    assert memory.slot_bytes == {"recurrent": lazy}
    assert memory.state_bytes == {"recurrent": 16 * lazy}
    assert 16 * lazy <= 2.5 * 2**30
    memory = predict_memory(manifest)
    assert memory.slot_bytes == {"recurrent": 48 * (state + 3 * inputs)}
    assert memory.state_bytes == {"recurrent": 18 * 48 * (state + 3 * inputs)}


def test_a_larger_batch_needs_more_pages(make_manifest: MakeManifest) -> None:
    memory = predict_memory(as_built_for(make_manifest(), max_batch_size=6))
    # ceil(85 / 4) pages a sequence, and page 0
    assert memory.kv_bytes["full"] == (1 + 6 * 22) * PAGE_BYTES
    assert memory.max_batch_size == 6


def test_a_window_does_not_depend_on_the_sequence_length(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    long, longer = (
        predict_memory(as_built_for(manifest, max_seq_len=n)).kv_bytes for n in (640, 6400)
    )
    assert longer["sliding"] == long["sliding"]
    assert longer["full"] > 9 * long["full"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 99999999999999999999}, "--max-batch-size is 9+; it must be at most"),
        ({"max_batch_size": 2**31 - 1}, "--max-batch-size 2147483647 with sequences of"),
        ({"max_seq_len": 8193}, "--max-seq-len 8193 exceeds the model's 8192 positions"),
        ({"max_seq_len": 1}, "--max-seq-len 1 has no capacity"),
    ],
)
def test_rejects_limits_that_no_build_supports(
    make_manifest: MakeManifest, limits: dict[str, int], message: str
) -> None:
    with pytest.raises(SpecbuildError, match=message):
        as_built_for(make_manifest(), **limits)


def test_the_batch_of_a_cuda_engine_fits_into_a_launch(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    with pytest.raises(SpecbuildError, match=r"--max-batch-size 257: .* at most 256 rows"):
        as_built_for(replace(manifest, backend="cuda"), max_batch_size=257)


def test_without_a_draft_there_are_no_aux_hidden_states(make_manifest: MakeManifest) -> None:
    assert predict_memory(make_manifest(draft=False)).outputs_bytes == 4 * 42 * 100


def test_every_tensor_has_separate_memory_on_a_gpu(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    stored = StoredTensor("BF16", (10, 50), ("a",))
    tensors = {"a": stored, "b": replace(stored, same_as="a"), "c": StoredTensor("U8", (7,), ())}
    manifest = replace(manifest, tensors=tensors)
    buffers = (Buffer("a", "weights", 1000), Buffer("arena", "arena", 900), Buffer("s", "state", 4))
    plan = Plan("sm_90a", 132, 13000, buffers, (), (), ())
    memory = predict_memory(manifest, plan)
    assert memory.weights_bytes == 2 * 10 * 50 * 2 + 7
    # Buffers lie at multiples of 512.
    assert memory.outputs_bytes == 1024 + 512
    assert predict_memory(manifest).weights_bytes == 5000


def test_rows_that_specpv_reruns_have_logits(make_manifest) -> None:
    specpv = SpecPv(4, 1, 2, 1, 24, 16, 8)
    manifest = replace(make_manifest(draft=False), specpv=specpv)
    assert predict_memory(manifest).outputs_bytes == 4 * 2 * (21 + 24) * 100


LENGTHS = st.integers(2, 1 << 20)
BUDGETS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"kv_memory": st.integers(1 << 20, 1 << 40)}),
    st.fixed_dictionaries({"kv_pages": st.integers(1, 1 << 20)}),
)


@examples(80)
@given(
    batch=st.integers(1, 4096) | st.none(),
    length=LENGTHS | st.none(),
    heads=st.integers(1, 64),
    width=st.integers(1, 512),
    page_size=st.sampled_from([4, 16, 64]),
    backend=st.sampled_from(["cpu", "cuda", "tensorrt-rtx"]),
    specpv=st.sampled_from([None, SpecPv(4, 1, 2, 1, 24, 16, 8)]),
    options=BUDGETS,
)
def test_totals_equal_pages_times_their_bytes(
    make_manifest, batch, length, heads, width, page_size, backend, specpv, options
) -> None:
    """Compare the prediction, the output of ``inspect`` and ``serve``, and its check."""
    manifest = make_manifest()
    groups = tuple(
        replace(group, kv_heads=heads, k_width=width, v_width=width, page_size=page_size)
        for group in manifest.cache_groups
    )
    target = replace(manifest.target, max_positions=1 << 20)
    manifest = replace(
        manifest,
        cache_groups=groups,
        backend=backend,
        specpv=specpv,
        options=options,
        target=target,
    )
    try:
        sized = as_built_for(manifest, max_batch_size=batch, max_seq_len=length)
    except SpecbuildError as error:
        # The budget holds no such sequence, or the sizes exceed 32 bits or a step.
        refusals = [f"--{name.replace('_', '-')}" for name in options] + ["--max-batch-size"]
        assert str(error).startswith(tuple(refusals))
        return
    memory = predict_memory(sized)
    assert set(memory.kv_bytes) == set(memory.page_bytes) == {group.name for group in groups}
    capacity = cache_capacity(sized.cache_groups, sized.limits)
    for group in sized.cache_groups:
        page = memory.page_bytes[group.name]
        assert page * (capacity.groups[group.name].pages + 1) == memory.kv_bytes[group.name]
    # The size of a page does not depend on their number.
    assert memory.page_bytes == predict_memory(manifest).page_bytes
    parts = memory.weights_bytes + sum(memory.kv_bytes.values()) + memory.outputs_bytes
    assert memory.total_bytes == parts
    held = [capacity.groups[group.name] for group in sized.cache_groups]
    text = io.StringIO()
    Console(width=80, file=text).print(cache_tables(sized, memory, capacity))
    rows = [re.split("[│┃]", line) for line in text.getvalue().splitlines()]
    cells = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows if len(row) > 2}
    assert cells["group"] == [group.name for group in groups]
    assert cells["pages"] == [str(kept.pages) for kept in held]
    assert cells["tokens/page"] == [str(page_size)] * len(groups)
    assert cells["bytes/page"] == [str(memory.page_bytes[group.name]) for group in groups]
    assert cells["tokens"] == [str(kept.tokens) for kept in held]
    assert size_text(sum(memory.kv_bytes.values())) in footprint(sized, memory)
    for group in sized.cache_groups:
        right = memory.page_bytes[group.name]
        PageOptions(page_bytes=(f"{group.name}={right}",)).check(sized.cache_groups, memory)
        with pytest.raises(SpecbuildError, match=f"takes {right} bytes"):
            PageOptions(page_bytes=(f"{group.name}={right + 1}",)).check(sized.cache_groups, memory)
