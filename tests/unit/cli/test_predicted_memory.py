"""Predicted memory against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specbuild.cli.tables.predicted_memory import predict_memory
from specbuild.runtime.engine_dir.manifest import Manifest, SpecPv, StoredTensor
from specbuild.runtime.engine_dir.plan import Buffer, Plan

MakeManifest = Callable[..., Manifest]
# one page of one layer: 2 heads, K and V of 8 floats, 4 slots
PAGE_BYTES = 2 * (8 + 8) * 4 * 4


def test_at_the_engines_own_limits(make_manifest: MakeManifest) -> None:
    memory = predict_memory(make_manifest())
    assert memory.weights_bytes == 5000
    assert memory.kv_bytes == {"full": 45 * PAGE_BYTES, "sliding": 23 * PAGE_BYTES}
    # logits of 2 × 21 rows, aux hidden states of 32 rows, 3 aux layers
    assert memory.outputs_bytes == 4 * (42 * 100 + 32 * 3 * 16)
    parts = memory.weights_bytes + sum(memory.kv_bytes.values()) + memory.outputs_bytes
    assert memory.total_bytes == parts


def test_engines_of_tensorrt_rtx_have_two_places_for_a_pool(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    one, two = (
        predict_memory(replace(manifest, backend=backend)).kv_bytes
        for backend in ("tensorrt", "tensorrt-rtx")
    )
    assert two == {name: 2 * held for name, held in one.items()}


def test_a_larger_batch_takes_more_pages(make_manifest: MakeManifest) -> None:
    memory = predict_memory(make_manifest(), max_batch_size=6)
    # ceil(85 / 4) pages a sequence, and page 0
    assert memory.kv_bytes["full"] == (1 + 6 * 22) * PAGE_BYTES
    assert memory.max_batch_size == 6


def test_a_window_does_not_grow_with_the_sequence(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    long, longer = (predict_memory(manifest, max_seq_len=n).kv_bytes for n in (640, 6400))
    assert longer["sliding"] == long["sliding"]
    assert longer["full"] > 9 * long["full"]


def test_without_a_draft_there_are_no_aux_hidden_states(make_manifest: MakeManifest) -> None:
    assert predict_memory(make_manifest(draft=False)).outputs_bytes == 4 * 42 * 100


def test_on_a_gpu_every_tensor_has_memory_of_its_own(make_manifest: MakeManifest) -> None:
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


def test_what_specpv_feeds_again_has_logits_too(make_manifest) -> None:
    specpv = SpecPv(4, 1, 2, 1, 24, 16, 8)
    manifest = replace(make_manifest(draft=False), specpv=specpv)
    assert predict_memory(manifest).outputs_bytes == 4 * 2 * (21 + 24) * 100
