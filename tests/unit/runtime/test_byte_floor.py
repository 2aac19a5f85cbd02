"""Byte floors against published numbers, against brute force, and against an engine's tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_draft, write_target
from geometries import GPT_OSS_20B
from hypothesis import given
from hypothesis import strategies as st
from plan_host import lowered_engine

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.plan_writer import program_bytes
from specbuild.runtime.engine_dir.plan import Binding, Buffer, OpCall, Plan, ProgramEntry
from specbuild.runtime.executors.cuda.programs import read_program
from specbuild.runtime.measure.byte_floor import (
    BytesByPart,
    EngineTraffic,
    PassTraffic,
    Work,
    engine_traffic,
    expected_experts,
    pass_traffic,
    tokens_seen,
)
from specbuild.runtime.measure.step_sections import step_sections

# Of one NVIDIA H200 and GPT-OSS-20B, computed by hand from its geometry.
CEILING_BYTES_PER_S = 4.53e12
STEP_BYTES, TOKENS_PER_S = 3.70e9, 1224
KV_BYTES_PER_TOKEN = 24576
PREFILL_TFLOP = 56
ITEMS = {"bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}


class Calls:
    """Op calls with buffers of their own."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.ops: list[OpCall] = []

    def tensor(self, space: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> Binding:
        size = prod(shape) * ITEMS[dtype]
        self.buffers.append(Buffer(str(len(self.buffers)), space, size))  # type: ignore[arg-type]
        return Binding(len(self.buffers) - 1, 0, shape, dtype)

    def call(self, op: str, inputs: dict[str, Binding], **attributes: object) -> None:
        self.ops.append(OpCall(op, attributes, inputs, {}))

    def traffic(self) -> PassTraffic:
        plan = Plan("sm_90a", 132, 13000, tuple(self.buffers), (), (), ())
        return pass_traffic(plan, self.ops)


def packed(outputs: int, width: int) -> tuple[int, int, int]:
    return (outputs // 16, width // 32, 512)


@pytest.fixture(scope="module")
def gpt_oss_20b() -> PassTraffic:
    """One row through GPT-OSS-20B as packed tensors; experts take 17 bytes for 32 weights."""
    g, calls = GPT_OSS_20B, Calls()
    h, inner, e = g.hidden, g.expert_inner, g.experts
    x = calls.tensor("arena", (1, h))
    qkv = (g.q_heads + 2 * g.kv_heads) * g.head_dim
    for kind in g.layer_types:
        norm = calls.tensor("weights", (h,))
        weight = calls.tensor("weights", packed(qkv, h))
        calls.call("RmsQkvRope", {"x": x, "norm": norm, "weight": weight})
        pool = calls.tensor("cache", (9, g.kv_heads, 64, g.head_dim))
        q = calls.tensor("arena", (1, g.q_heads, g.head_dim))
        window = g.sliding_window if kind == "sliding_attention" else 0
        calls.call("PagedTreeAttention", {"q": q, "k_pool": pool, "v_pool": pool}, window=window)
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
            "RmsMoe", {"x": x, "router_weight": router, **experts}, top_k=g.experts_per_token
        )
    head = calls.tensor("weights", packed(g.vocab, h))
    calls.call("HeadChoose", {"x": x, "weight": head})
    return calls.traffic()


def test_a_step_of_the_20b_reads_what_is_published(gpt_oss_20b: PassTraffic) -> None:
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


@pytest.mark.parametrize(("experts", "k", "rows"), [(32, 4, 1), (32, 4, 7), (8, 2, 3), (128, 4, 9)])
def test_expected_experts_are_those_of_random_rows(experts: int, k: int, rows: int) -> None:
    random = np.random.default_rng(rows)
    drawn = [
        len({int(e) for _ in range(rows) for e in random.choice(experts, k, replace=False)})
        for _ in range(400)
    ]
    assert expected_experts(experts, k, rows) == pytest.approx(np.mean(drawn), rel=0.05)
    assert expected_experts(0, 0, rows) == 0


@given(rows=st.integers(1, 9), context=st.integers(0, 40), window=st.integers(0, 20) | st.just(0))
def test_tokens_and_pairs_are_those_of_the_mask(rows: int, context: int, window: int) -> None:
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


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LoweredEngine:
    path = tmp_path_factory.mktemp("checkpoints")
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(path / "target", layers=2, experts=4, experts_per_token=2, **sizes)
    write_draft(path / "draft", target_layers=2, target_hidden=96, inner=64, **sizes)
    limits = {"draft_top_k": 1, "draft_depth": 2, "draft_tokens": 2}
    target, draft = Path(path / "target"), Path(path / "draft")
    return lowered_engine(target, draft, max_seq_len=64, max_batch_size=1, **limits)


@pytest.fixture(scope="module")
def traffic(engine: LoweredEngine) -> EngineTraffic:
    entries = [entry for entry, _ in engine.programs]
    plan = engine.writer.plan(engine.target, 0, _Uncompiled(), entries)
    lowered = {entry.name: program for entry, program in engine.programs}

    def read(entry: ProgramEntry):
        return read_program(program_bytes(engine.writer.program(lowered[entry.name])), entry)

    return engine_traffic(plan, read)


class _Uncompiled(dict):
    """Any kernel, not compiled."""

    def __missing__(self, kernel: object) -> object:
        from specbuild.runtime.engine_dir.plan import CompiledKernel

        return CompiledKernel("folder/file:entry", "", "entry", 0, 0, 0)


def test_every_stored_tensor_is_read_once_by_some_pass(
    engine: LoweredEngine, traffic: EngineTraffic
) -> None:
    """By name, from the recipes of what is stored."""
    stored = {name: recipe.nbytes for name, recipe in engine.weights.items()}
    looked_up = [n for n in stored if "embed_tokens" in n or "rope" in n or n == "d2t"]
    constants = [n for n in stored if n.startswith("constant")]
    experts = [n for n in stored if ".experts." in n]
    head = ["lm_head.packed", "model.norm.weight"]
    draft = [n for n in stored if n.startswith("draft.")]
    rest = set(stored) - {*looked_up, *constants, *experts, *head, *draft}
    assert len(experts) == 2 * 4 and rest and draft

    target = traffic.target.bytes_read(Work(3, 1, 0, experts=4))
    assert target.experts == sum(stored[n] for n in experts)
    assert target.head == sum(stored[n] for n in head)
    lookups = (
        stored["model.embed_tokens.weight"] // engine.weights["model.embed_tokens.weight"].shape[0]
    )
    rope = 2 * 2 * 16 * 4  # cos and sin of half a head, fp32, in each of two layers
    assert target.dense == sum(stored[n] for n in rest) + 3 * (lookups + rope)
    some = traffic.target.bytes_read(Work(3, 1, 0, experts=2.5))
    assert some.experts == pytest.approx(2.5 / 4 * target.experts)

    first = traffic.level(1, Work(1, 1, 0))
    assert first.total == first.draft
    fixed = sum(stored[n] for n in draft)
    # Beside the weights: a row of each table, one token of the cache, two constants.
    assert fixed < first.draft < fixed + 2000
    further = traffic.level(2, Work(1, 1, 0))
    fused = sum(stored[n] for n in draft if ".fc." in n)
    assert fused > 0
    assert first.draft - further.draft == pytest.approx(fused, abs=300)
    # Keys and values alone: the fusion and QKV, no O, MLP or head, and no cache is read.
    assert traffic.taken_up is not None
    taken_up = traffic.taken_up.bytes_read(Work(1, 1, 100)).total
    kept = sum(stored[n] for n in draft if ".fc." in n or "qkv" in n or "q_proj" in n)
    assert kept > fused and kept < taken_up < kept + 2000 < first.draft
    step = traffic.step(Work(3, 1, 9), top_k=1, depth=2)
    levels = [traffic.level(n, Work(1, 1, 9)) for n in (1, 2)]
    parts = [traffic.target.bytes_read(Work(3, 1, 9)), *levels]
    assert step.total == pytest.approx(sum(part.total for part in parts))


def test_sections_hold_every_op_in_order(engine: LoweredEngine) -> None:
    found = {}
    for entry, lowered in engine.programs:
        if entry.kind == "step":
            sections = step_sections(engine.writer.program(lowered).ops)
            found[entry.name] = [section.name for section in sections]
            ends = [-1] + [section.last for section in sections]
            assert [s.first for s in sections] == [end + 1 for end in ends[:-1]]
            assert ends[-1] == len(lowered.ir.calls) - 1
    assert found["step@1"] == found["step@1.logits"] == ["target", "accept"]
    assert found["step@1.draft-1-1-1"] == ["level 1", "select", "target", "accept"]
    assert found["step@1.draft-1-2-2"] == ["level 1", "level 2", "select", "target", "accept"]
    with pytest.raises(ValueError, match="decoding step"):
        step_sections([OpCall("Embed", {}, {}, {})])


def test_parts_add_up() -> None:
    random = np.random.default_rng(3)
    one, two = (BytesByPart(*random.random(6).tolist()) for _ in range(2))
    assert one.plus(two).total == pytest.approx(one.total + two.total)
    assert one.as_draft().draft == one.total
    assert json.dumps(one.plus(two).kv_full) == json.dumps(one.kv_full + two.kv_full)
