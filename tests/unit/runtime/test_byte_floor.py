"""Byte floors against published numbers, brute force, and an engine's tensors."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from geometries import GPT_OSS_20B
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.backends.cuda.plan.plan_writer import call_traffic
from specbuild.builder.backends.cuda.step.ir import Call, Storage, Tensor
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import OpCall, Space
from specbuild.runtime.measure.byte_floor import (
    BytesByPart,
    EngineTraffic,
    PassTraffic,
    Work,
    expected_experts,
    pass_traffic,
    tokens_seen,
)

# For one NVIDIA H200 and GPT-OSS-20B, computed by hand from the geometry.
CEILING_BYTES_PER_S = 4.53e12
STEP_BYTES, TOKENS_PER_S = 3.70e9, 1224
KV_BYTES_PER_TOKEN = 24576
PREFILL_TFLOP = 56
ITEMS = {"bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}


class Calls:
    """Op calls on their own tensors, with the traffic that their ops declare."""

    def __init__(self) -> None:
        self.ops: list[OpCall] = []

    def tensor(self, space: Space, shape: tuple[int, ...], dtype: str = "bfloat16") -> Tensor:
        storage = Storage("tensor", space, prod(shape) * ITEMS[dtype])
        return Tensor(storage, 0, TensorInfo(shape, dtype))

    def call(self, op: str, inputs: dict[str, Tensor], **attributes: object) -> None:
        traffic = call_traffic(Call(op_named(op), attributes, inputs, {}))
        self.ops.append(OpCall(op, attributes, {}, {}, traffic=traffic))

    def traffic(self) -> PassTraffic:
        return pass_traffic(self.ops)


def packed(outputs: int, width: int) -> tuple[int, int, int]:
    return (outputs // 16, width // 32, 512)


def attend(calls: Calls, window: int, form: str) -> None:
    """Return the attention of one row of GPT-OSS-20B over keys and values, or latents of 512.

    ``chosen``: up to 2048 tokens selected by an indexer of 4 heads of 64. Layers with a window have
    no latents.
    """
    g = GPT_OSS_20B
    tensors = {"q": calls.tensor("arena", (1, g.q_heads, g.head_dim))}
    if form == "chosen" and not window:
        keys = calls.tensor("cache", (9, 1, 64, 64))
        indexed = {"q": calls.tensor("arena", (1, 4, 64)), "key_pool": keys}
        calls.call("DsaIndexer", indexed, top_k=1980, first_tokens=4, recent_tokens=64)
        tensors["selected"] = calls.tensor("arena", (1, 1, 4096), "int32")
    if form == "latents" and not window:
        tensors["c_pool"] = calls.tensor("cache", (9, 1, 64, 512))
        for name in ("w_k", "w_v"):
            tensors[name] = calls.tensor("weights", (512, g.kv_heads, g.head_dim))
        for name in ("cos", "sin"):
            tensors[name] = calls.tensor("weights", (4096, 32), "float32")
        calls.call("MlaAttention", tensors, window=window)
        return
    tensors["k_pool"] = tensors["v_pool"] = calls.tensor("cache", (9, g.kv_heads, 64, g.head_dim))
    calls.call("PagedTreeAttention", tensors, window=window)


def gpt_oss_20b_pass(form: str) -> PassTraffic:
    """Return a pass of one row of GPT-OSS-20B. Experts take 17 bytes for 32 weights."""
    g, calls = GPT_OSS_20B, Calls()
    moe = g.feed_forward(0)
    h, inner, e = g.hidden, moe.inner, moe.experts
    x = calls.tensor("arena", (1, h))
    qkv = (g.q_heads + 2 * g.kv_heads) * g.head_dim
    for kind in g.layer_types:
        norm = calls.tensor("weights", (h,))
        weight = calls.tensor("weights", packed(qkv, h))
        calls.call("RmsQkvRope", {"x": x, "norm": norm, "weight": weight})
        attend(calls, g.sliding_window if kind == "sliding_attention" else 0, form)
        attended = calls.tensor("arena", (1, g.q_heads * g.head_dim))
        weight = calls.tensor("weights", packed(h, g.q_heads * g.head_dim))
        calls.call("Linear", {"x": attended, "weight": weight})
        experts = {
            "gate_up": calls.tensor("weights", (e, 2 * inner, h * 17 // 32), "uint8"),
            "down": calls.tensor("weights", (e, h, inner * 17 // 32), "uint8"),
            "gate_up_bias": calls.tensor("weights", (e, 2 * inner)),
            "down_bias": calls.tensor("weights", (e, h)),
        }
        router = calls.tensor("weights", (e, h))
        calls.call(
            "RmsMoe",
            {"x": x, "router_weight": router, **experts},
            top_k=moe.experts_per_token,
            shared=0,
        )
    head = calls.tensor("weights", packed(g.vocab, h))
    calls.call("HeadChoose", {"x": x, "weight": head})
    return calls.traffic()


@pytest.fixture(scope="module")
def gpt_oss_20b() -> PassTraffic:
    """GPT-OSS-20B with keys and values."""
    return gpt_oss_20b_pass("keys")


def test_bytes_of_a_20b_step_equal_the_published_value(gpt_oss_20b: PassTraffic) -> None:
    floor = gpt_oss_20b.bytes_read(Work(1, 1, 0))
    assert floor.total == pytest.approx(STEP_BYTES, rel=0.005)
    assert pytest.approx(TOKENS_PER_S, rel=0.005) == CEILING_BYTES_PER_S / floor.total
    longer = gpt_oss_20b.bytes_read(Work(1, 1, 32768))
    assert longer.kv_full - floor.kv_full == 32768 * KV_BYTES_PER_TOKEN
    assert longer.kv_sliding == 128 * KV_BYTES_PER_TOKEN
    assert gpt_oss_20b.floating_operations(Work(8192, 1, 0, logit_rows=1)) == pytest.approx(
        PREFILL_TFLOP * 1e12, rel=0.01
    )


@pytest.mark.parametrize(
    ("rows", "ratio"), [(1, 1.0), (2, 1.30), (4, 1.79), (8, 2.46), (16, 3.08), (32, 3.36)]
)
def test_more_rows_read_more_experts_as_published(
    gpt_oss_20b: PassTraffic, rows: int, ratio: float
) -> None:
    one, many = (gpt_oss_20b.bytes_read(Work(n, n, 0)).total for n in (1, rows))
    assert many / one == pytest.approx(ratio, abs=0.01)


# Of twelve layers without a window, at batch B and context C: B·(C + 1) entries of 2·8·64 bf16
# (keys) or 512 (latents), or B·2048 entries of the former and B·(C + 1) keys of 64 (chosen);
# then all bytes, with the experts that random rows choose, and all operations.
FLOORS = {
    ("keys", 1, 1024): (25190400, 3735886848, 7440973824),
    ("keys", 1, 32768): (805330944, 4516027392, 13682098176),
    ("keys", 1, 131072): (3221250048, 6931946496, 33009451008),
    ("keys", 8, 1024): (201523200, 9336157791.832031, 59527790592),
    ("keys", 8, 32768): (6442647552, 15577282143.832031, 109456785408),
    ("keys", 8, 131072): (25770000384, 34904634975.83203, 264075608064),
    ("latents", 1, 1024): (12595200, 3735877632, 14645379072),
    ("latents", 1, 32768): (402665472, 4125947904, 242446417920),
    ("latents", 1, 131072): (1610625024, 5333907456, 947894796288),
    ("latents", 8, 1024): (100761600, 9248003679.832031, 117163032576),
    ("latents", 8, 32768): (3221323776, 12368565855.832031, 1939571343360),
    ("latents", 8, 131072): (12885000192, 22032242271.83203, 7583158370304),
    ("chosen", 1, 1024): (26764800, 3737461248, 7447271424),
    ("chosen", 1, 32768): (100664832, 3811361280, 7843436544),
    ("chosen", 1, 131072): (251659776, 3962356224, 8447416320),
    ("chosen", 8, 1024): (214118400, 9348752991.832031, 59578171392),
    ("chosen", 8, 32768): (805318656, 9939953247.832031, 62747492352),
    ("chosen", 8, 131072): (2013278208, 11147912799.832031, 67579330560),
}


@pytest.mark.parametrize("form", ["keys", "latents", "chosen"])
def test_floors_of_the_20b_over_each_form_of_cache(form: str) -> None:
    traffic = gpt_oss_20b_pass(form)
    wanted = {key[1:]: floors for key, floors in FLOORS.items() if key[0] == form}
    assert len(wanted) == 6
    for (batch, context), (kv_full, total, operations) in wanted.items():
        work = Work(batch, batch, context)
        read = traffic.bytes_read(work)
        assert (read.kv_full, read.kv_sliding) == (kv_full, batch * 128 * KV_BYTES_PER_TOKEN)
        assert read.total == pytest.approx(total, rel=1e-12)
        assert traffic.floating_operations(work) == operations


@pytest.mark.parametrize(
    ("batch", "seen_bytes", "draft_bytes"),
    [(1, 126050304, 23019666432), (8, 1008402432, 109300234894.91296)],
)
def test_steps_over_views_read_the_view_only(
    gpt_oss_20b: PassTraffic, batch: int, seen_bytes: int, draft_bytes: float
) -> None:
    """A view of 5120 tokens and 9 nodes; three levels of a draft over all 131072.

    5129 entries of a sequence, and three of the passes above with one or two rows a sequence.
    """
    engine = EngineTraffic(gpt_oss_20b, gpt_oss_20b, gpt_oss_20b)
    step = engine.step(Work(9 * batch, batch, 5120), top_k=2, depth=3, draft_context=131072)
    assert step.kv_full == seen_bytes
    assert step.draft == pytest.approx(draft_bytes, rel=1e-12)


def test_an_op_that_declares_no_traffic_reads_no_weight() -> None:
    calls = Calls()
    given = {"x": calls.tensor("arena", (1, 32)), "captured": calls.tensor("arena", (1, 64))}
    calls.call("Capture", given, column=0)
    assert calls.ops[0].traffic is None
    stored = given | {"x": calls.tensor("weights", (1, 32))}
    with pytest.raises(AssertionError, match="Capture reads"):
        calls.call("Capture", stored, column=0)


@pytest.mark.parametrize(("experts", "k", "rows"), [(32, 4, 1), (32, 4, 7), (8, 2, 3), (128, 4, 9)])
def test_expected_experts_equal_a_simulation(experts: int, k: int, rows: int) -> None:
    random = np.random.default_rng(rows)
    drawn = [
        len({int(e) for _ in range(rows) for e in random.choice(experts, k, replace=False)})
        for _ in range(400)
    ]
    assert expected_experts(experts, k, rows) == pytest.approx(np.mean(drawn), rel=0.05)
    assert expected_experts(0, 0, rows) == 0


@given(rows=st.integers(1, 9), context=st.integers(0, 40), window=st.integers(0, 20) | st.just(0))
def test_tokens_and_pairs_equal_those_of_the_mask(rows: int, context: int, window: int) -> None:
    """Rows at positions ``context`` … see what is at or before them, inside the window."""
    slots, positions = np.arange(context + rows), context + np.arange(rows)[:, None]
    mask = slots <= positions
    if window:
        mask &= slots > positions - window
    assert tokens_seen(Work(rows, 1, context), window) == mask.any(0).sum()
    traffic = PassTraffic()
    calls = Calls()
    pool = calls.tensor("cache", (3, 2, 16, 32))
    q = calls.tensor("arena", (rows, 6, 32))
    calls.call("PagedTreeAttention", {"q": q, "k_pool": pool, "v_pool": pool}, window=window)
    traffic = calls.traffic()
    # Two products of six heads of 32 for every pair, a product and a sum each.
    found = traffic.floating_operations(Work(2 * rows, 2, context))
    assert found == 2 * mask.sum() * 2 * 2 * 6 * 32
    read = traffic.bytes_read(Work(2 * rows, 2, context))
    assert read.total == 2 * mask.any(0).sum() * 2 * 2 * 32 * 2
    assert (read.kv_full == 0) == (window > 0)


@given(rows=st.integers(1, 5), context=st.integers(0, 40), window=st.integers(0, 20) | st.just(0))
def test_latents_cost_one_entry_a_token_and_their_rebuilding_once(
    rows: int, context: int, window: int
) -> None:
    """Keys of 2 heads of 16 from 24 values; 6 query heads of 16 score and sum."""
    slots, positions = np.arange(context + rows), context + np.arange(rows)[:, None]
    mask = slots <= positions
    if window:
        mask &= slots > positions - window
    calls = Calls()
    tensors = {
        "q": calls.tensor("arena", (rows, 6, 16)),
        "c_pool": calls.tensor("cache", (3, 1, 16, 24)),
        "w_k": calls.tensor("arena", (24, 2, 16)),
        "w_v": calls.tensor("arena", (24, 2, 16)),
    }
    calls.call("MlaAttention", tensors, window=window)
    traffic = calls.traffic()
    work = Work(2 * rows, 2, context)
    seen, pairs = mask.any(0).sum(), mask.sum()
    assert traffic.bytes_read(work).total == 2 * seen * 24 * 2
    rebuilt, attended = seen * 2 * 24 * 2 * 16, pairs * 2 * 6 * (16 + 24)
    projected = rows * 2 * 6 * 24 * 16
    assert traffic.floating_operations(work) == 2 * (rebuilt + attended + projected)


@given(rows=st.integers(1, 5), context=st.integers(0, 40))
def test_chosen_tokens_are_gathered_by_every_row_and_indexer_keys_read_once(
    rows: int, context: int
) -> None:
    """Two sequences, lists of 12; 2 KV heads of 16 under 6, an indexer of 3 heads of 8."""
    calls = Calls()
    pool = calls.tensor("cache", (3, 2, 16, 16))
    attended = {"q": calls.tensor("arena", (rows, 6, 16)), "k_pool": pool, "v_pool": pool}
    keys = calls.tensor("cache", (3, 1, 16, 8))
    indexed = {"q": calls.tensor("arena", (rows, 3, 8)), "key_pool": keys}
    for _ in range(2):
        calls.call("DsaIndexer", indexed, top_k=7, first_tokens=1, recent_tokens=4)
        lists = calls.tensor("arena", (rows, 1, 44), "int32")
        calls.call("PagedTreeAttention", {**attended, "selected": lists}, window=0)
    traffic = calls.traffic()
    work = Work(2 * rows, 2, context)
    seen = context + rows
    gathered = 2 * rows * min(12, seen)
    read = traffic.bytes_read(work)
    assert read.kv_full == read.total == 2 * (gathered * 2 * 2 * 16 * 2 + 2 * seen * 8 * 2)
    pairs = sum(context + i + 1 for i in range(rows))
    scored = 2 * pairs * 2 * 3 * 8
    assert traffic.floating_operations(work) == 2 * (gathered * 4 * 6 * 16 + scored)


@given(rows=st.integers(1, 5), context=st.integers(0, 40))
def test_every_row_rebuilds_the_keys_of_the_latents_that_it_gathers(
    rows: int, context: int
) -> None:
    """Two sequences, lists of 12; 2 KV heads of 16 under 6, a latent of 24."""
    calls = Calls()
    tensors = {
        "q": calls.tensor("arena", (rows, 6, 16)),
        "c_pool": calls.tensor("cache", (3, 1, 16, 24)),
        "w_k": calls.tensor("arena", (24, 2, 16)),
        "w_v": calls.tensor("arena", (24, 2, 16)),
        "selected": calls.tensor("arena", (rows, 1, 44), "int32"),
    }
    indexed = {
        "q": calls.tensor("arena", (rows, 3, 8)),
        "key_pool": calls.tensor("cache", (3, 1, 16, 8)),
    }
    calls.call("DsaIndexer", indexed, top_k=7, first_tokens=1, recent_tokens=4)
    calls.call("MlaAttention", tensors, window=0)
    traffic = calls.traffic()
    gathered = 2 * rows * min(12, context + rows)
    work = Work(2 * rows, 2, context)
    assert traffic.bytes_read(work).total == gathered * 24 * 2 + 2 * (context + rows) * 8 * 2
    pairs = sum(context + i + 1 for i in range(rows))
    attended = gathered * (2 * 24 * 2 * 16 + 2 * 6 * (16 + 24))
    projected = 2 * rows * 2 * 6 * 24 * 16
    scored = 2 * pairs * 2 * 3 * 8
    assert traffic.floating_operations(work) == attended + projected + scored


def test_parts_add_up() -> None:
    random = np.random.default_rng(3)
    one, two = (BytesByPart(*random.random(6).tolist()) for _ in range(2))
    assert one.plus(two).total == pytest.approx(one.total + two.total)
    assert one.as_draft().draft == one.total
    assert json.dumps(one.plus(two).kv_full) == json.dumps(one.kv_full + two.kv_full)
