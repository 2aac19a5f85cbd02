"""The standard ops of TensorRT-RTX's graphs, tested independently of the custom ops."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from body_session import run_record
from checkpoints import write_draft, write_target
from forms import run_standard_moe
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from latent_files import write_latents

from specbuild.builder import graphs
from specbuild.builder.backends.backend import run_role_passes
from specbuild.builder.backends.cpu import backend as cpu_backend
from specbuild.builder.backends.cpu.retype import retype_to_fp32
from specbuild.builder.backends.tensorrt.standard import choose as standard_choose
from specbuild.builder.backends.tensorrt.standard import ops as standard_ops
from specbuild.builder.backends.tensorrt.standard.lowering import expert_storage, standard_passes
from specbuild.builder.backends.tensorrt.standard.ops import FP4, INT8
from specbuild.builder.build import build
from specbuild.builder.graph.passes.pipeline import GraphPass
from specbuild.builder.options import BuildOptions, DraftOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.body import BodyBuilder
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams, Prompt, TokenEvent
from specbuild.runtime.sampling import SamplingParams

# Node types that the parser of TensorRT-RTX 1.7 rejects, of those that bodies may use.
REFUSED = {"BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Unique", "Compress"}
# Known answers of Random123 (kat_vectors): counter, key, result.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
]
SIZES = {"hidden": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 16}


def graphs_of(models: dict[str, ir.Model]) -> list[tuple[str, ir.Model]]:
    return sorted(models.items())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Build one random model with the graphs of the CPU, and of TensorRT-RTX in fp32."""
    folder = tmp_path_factory.mktemp("standard")
    write_target(folder / "target", layers=3, **SIZES)
    write_latents(folder / "target", {2: 12})
    write_draft(folder / "draft", target_layers=3, target_hidden=64, inner=64, **SIZES)
    retyped = GraphPass("retype-fp32", retype_to_fp32)
    lowered: dict[str, dict[str, ir.Model]] = {}
    exported: dict[str, ir.Model] = {}
    export = graphs.export_graphs

    def export_once(*arguments: Any) -> dict[str, ir.Model]:
        exported.update({} if exported else export(*arguments))
        return {role: model.clone() for role, model in exported.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "export_graphs", export_once)
        for name, passes in (
            ("cpu", cpu_backend.cpu_passes),
            ("standard", lambda *_, **__: (retyped, *standard_passes(INT8))),
        ):
            patch.setattr(cpu_backend, "cpu_passes", passes)

            def kept(models: dict[str, ir.Model], *rest: Any, name: str = name) -> Any:
                lowered[name] = models
                return run_role_passes(models, *rest)

            patch.setattr(cpu_backend, "run_role_passes", kept)
            options = BuildOptions(
                model=folder / "target",
                draft=folder / "draft",
                output=folder / name,
                limits=LimitOptions(max_seq_len=96),
                drafting=DraftOptions(top_k=3, depth=3, tokens=8),
            )
            build(options, SilentProgress())
    return {"folder": folder, "graphs": lowered["standard"]}


def test_graphs_have_no_node_that_the_parser_rejects(engines: dict[str, Any]) -> None:
    for role, model in graphs_of(engines["graphs"]):
        for node in model.graph.all_nodes():
            assert not node.domain, f"{role}: {node.domain}::{node.op_type}"
            assert node.op_type not in REFUSED, role
            unsigned = {ir.DataType.UINT32, ir.DataType.UINT64}
            assert not unsigned & {value.dtype for value in node.outputs}, role


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.8, seed=6),
    ],
)
def test_generates_the_tokens_of_the_cpu_backend(
    engines: dict[str, Any], sampling: SamplingParams
) -> None:
    """Run every role with ONNX Runtime, and draft and verify trees: the tokens are equal."""
    prompts = [Prompt(str(i), prompt_ids=tuple(range(3 + i, 20 + 4 * i))) for i in range(3)]
    params = GenerateParams(max_new_tokens=24, sampling=sampling, ignore_eos=True)
    tokens_of = {}
    for name in ("cpu", "standard"):
        engine = Engine.load(engines["folder"] / name)
        events = engine.generate(prompts, params, speculation=DraftShape(3, 3, 8))
        tokens_of[name] = [(e.request, e.token_id) for e in events if isinstance(e, TokenEvent)]
    assert len(tokens_of["cpu"]) == 3 * 24
    assert sorted(tokens_of["cpu"]) == sorted(tokens_of["standard"])


def evaluated(record: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    names = [f"x{i}" for i in range(len(arrays))]
    return run_record(names, list(arrays), record)


words = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_exclusive_or_and_products_are_exact(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(side, np.int64) for side in zip(*pairs, strict=True))
    [outputs] = evaluated(lambda b, v: [standard_choose.exclusive_or(b, v[0], v[1])], x, y)
    assert outputs.tolist() == [a ^ c for a, c in pairs]
    factor = 0xD2511F53
    high, low = evaluated(lambda b, v: standard_choose.high_and_low(b, v[0], factor), x)
    assert [(int(h) << 32) + int(w) for h, w in zip(high, low, strict=True)] == [
        a * factor for a, _ in pairs
    ]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_equals_published_vectors(counter: str, key: str, result: str) -> None:
    given_words = [int(word, 16) for word in f"{counter} {key}".split()]
    arrays = [np.array([word], np.int64) for word in given_words]

    def record(b: BodyBuilder, v: Any) -> Any:
        return standard_choose.philox(b, v[:4], v[4:], b.scalar(10, np.int64))

    outputs = evaluated(record, *arrays)
    assert [int(word[0]) for word in outputs] == [int(word, 16) for word in result.split()]


def remaining_by_sorting(scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Return which tokens of a row remain, by definition: a stable sort, then a running sum."""
    order = np.argsort(-scaled, kind="stable")
    count = top_k if top_k > 0 else len(order)
    chosen = order[:count]
    odds = np.exp(scaled[chosen].astype(np.float64) - scaled.max())
    before = np.concatenate([[0.0], np.cumsum(odds / odds.sum())[:-1]])
    kept = np.zeros(len(order), bool)
    first = np.arange(len(chosen)) == 0
    kept[chosen[(before < top_p) | first | (top_p == 1)]] = True
    # Rounding decides if the sum equals the limit.
    assume(top_p == 1 or not (np.abs(before - top_p) < 1e-6).any())
    return kept


@given(st.integers(0, 2**31), st.integers(0, 40), st.sampled_from([1.0, 0.93, 0.5, 0.02]))
@settings(max_examples=15, deadline=None)
def test_top_k_and_top_p_equal_a_sort(seed: int, top_k: int, top_p: float) -> None:
    """Draw logits from a coarse grid, so that many tie, and one row with a far larger range."""
    rng = np.random.default_rng(seed)
    logits = np.stack([rng.integers(-6, 7, 60) / 2, rng.normal(size=60) * 40, rng.normal(size=60)])
    logits = logits.astype(np.float32)
    arrays = [
        np.full(3, 1.0, np.float32), np.full(3, top_k, np.int32), np.full(3, top_p, np.float32),
    ]  # fmt: skip

    def record(b: BodyBuilder, v: Any) -> Any:
        scaled, temperature, k, p = v
        cut = standard_choose.TokenFilter(b, b.Greater(temperature, b.scalar(0.0)), scaled)
        in_top_k = cut.top_k(k)
        return [b.And(in_top_k, cut.top_p(p, in_top_k))]

    [outputs] = evaluated(record, logits, *arrays)
    for row, logit in zip(outputs, logits, strict=True):
        expected = remaining_by_sorting(logit, top_k, top_p)
        # A token 200 below the best cannot be drawn, so either result is right for it.
        drawable = logit > logit.max() - 200
        assert (row == expected)[drawable].all()


def experts(rng: np.random.Generator) -> list[np.ndarray | None]:
    """Return Moe's inputs: 3 experts of 64 inner columns over 32 hidden ones, in MXFP4."""

    def blocks(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        codes = rng.integers(0, 256, (3, rows, columns // 32, 16), dtype=np.uint8)
        return codes, rng.integers(120, 127, (3, rows, columns // 32), dtype=np.uint8)

    gate_up, down = blocks(128, 32), blocks(32, 64)
    biases = [rng.normal(size=(3, n)).astype(np.float32) for n in (128, 32)]
    x, logits = rng.normal(size=(5, 32)), rng.normal(size=(5, 3))
    return [
        x.astype(np.float32), logits.astype(np.float32), *gate_up, biases[0], *down, biases[1],
    ]  # fmt: skip


@pytest.mark.parametrize("storage", [FP4, INT8], ids=["four bits", "eight bits"])
def test_experts_in_four_or_eight_bits_equal_the_checkpoint(storage: Any) -> None:
    op, arrays = op_named("Moe"), experts(np.random.default_rng(3))
    tensors = [torch.from_numpy(a) for a in arrays if a is not None]
    expected = op.reference(*tensors, **op.complete({"top_k": 2})).numpy()
    [outputs] = run_standard_moe(op, arrays, {"top_k": 2}, storage)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


def test_every_code_and_scale_is_stored_exactly() -> None:
    """Check all 16 codes with every scale that a checkpoint may have, in both forms."""
    codes = np.tile(np.arange(256, dtype=np.uint8), 2).reshape(1, 32, 1, 16)
    scales = np.linspace(1, 254, 32).astype(np.uint8).reshape(1, 32, 1)
    expected = expert_weight(torch.from_numpy(codes), torch.from_numpy(scales))
    for storage, values in ((FP4, None), (INT8, INT8.table)):
        packed = standard_ops._packed(torch.from_numpy(codes), storage.table).numpy()
        if values is None:
            nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(1, 32, 32)
            unpacked = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        else:
            unpacked = packed.astype(np.float32)
        steps = torch.exp2(torch.from_numpy(scales).float() - storage.bias).bfloat16()
        whole = torch.from_numpy(unpacked) * steps.float()
        assert torch.equal(whole.transpose(1, 2), expected)


def test_four_bits_require_support_by_every_gpu() -> None:
    assert expert_storage(["sm_120"]) is expert_storage(["sm_120", "sm_121"]) is FP4
    assert expert_storage(["sm_89", "sm_120"]) is expert_storage(["sm_80"]) is INT8
