"""Small random Llamas and Qwen3 on a GPU: against transformers, and bit for bit against themselves.

What bf16 costs is measured beside it, by transformers' own bf16 forward of the same checkpoint. A
draft, neighbours and the cuts of a prompt change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import edit_tensors
from checkpoints import write_draft
from example_engine import CHAIN, TREE, on_gpu, outputs, records
from llama_checkpoints import write_llama
from prompt_cuts import cut_at_random
from test_transformers_gpu import Forward, check_choices, check_errors, near_tie, scores

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.linear.block_scaled import mxfp4_blocks
from specbuild.plugins_cuda.moe.expert_weight import expert_weight
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

pytestmark = pytest.mark.timeout(600)

# So few tokens that a random draft is right now and then.
VOCAB, LAYERS, TOKENS = 32, 3, 64
# Prompts of a batch; the longest is cut, and stands in pages of its own.
LENGTHS = (5, 230, 40, 17)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 544, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "dtype": "bfloat16",
}  # fmt: skip
GEOMETRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, heads of 64": ("llama", {}),
    "llama, tied, heads of 128": ("llama", {
        "head_dim": 128, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, biases, as many KV heads": ("llama", {
        "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "qwen3, heads of 128": ("qwen3", {"head_dim": 128, "num_attention_heads": 4}),
    "qwen3, tied, heads of 32": ("qwen3", {
        "head_dim": 32, "num_attention_heads": 16, "tie_word_embeddings": True}),
    "qwen3_moe, mxfp4": ("qwen3_moe", {"head_dim": 64, "moe_intermediate_size": 64}),
}  # fmt: skip
# What the drafts have beside a plain one, in turn.
DRAFTS: tuple[dict[str, Any], ...] = (
    {}, {"norm_before_fc": True, "norm_output": True}, {"fc_norm": True, "norm_output": True},
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint, and its engine on the GPU with a random draft."""

    path: Path
    engine: Engine


@pytest.fixture(scope="module", params=GEOMETRIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    kind, changes = GEOMETRIES[request.param]
    folder = tmp_path_factory.mktemp("dense")
    write_llama(folder / "model", kind, **SIZES | changes)
    coded = "mxfp4" if request.param.endswith("mxfp4") else None
    if coded is not None:
        edit_tensors(folder / "model", round_to_mxfp4)
    variant = DRAFTS[list(GEOMETRIES).index(request.param) % len(DRAFTS)]
    write_draft(
        folder / "draft", target_layers=LAYERS, target_hidden=256, target_vocab=VOCAB, hidden=256,
        inner=320, head_dim=64, draft_vocab=32, aux_layers=(0, 1, 2), max_positions=1024, **variant,
    )  # fmt: skip
    options = BuildOptions.from_flat(
        model=folder / "model", draft=folder / "draft", output=folder / "engine", backend="cuda",
        max_seq_len=512, max_batch_size=4, page_size=64, weights_dtype=coded, **asdict(TREE),
    )  # fmt: skip
    build(options, SilentProgress())
    with on_gpu(folder / "engine") as engine:
        yield Model(folder / "model", engine)


def round_to_mxfp4(tensors: dict[str, torch.Tensor]) -> None:
    """All that is stored in MXFP4 becomes what that holds, for transformers too."""
    for name in [n for n in tensors if n.endswith("_proj.weight") or n.startswith("lm_head")]:
        blocks, scales = mxfp4_blocks(tensors[name][None])
        tensors[name] = expert_weight(blocks, scales)[0].T.contiguous().to(tensors[name].dtype)


def prompts() -> list[Prompt]:
    random = np.random.default_rng(7)
    return [Prompt(str(n), tuple(random.integers(3, VOCAB, n).tolist())) for n in LENGTHS]


def params() -> list[GenerateParams]:
    """Every other one samples."""
    return [
        GenerateParams(
            max_new_tokens=TOKENS,
            sampling=SamplingParams(temperature=float(i % 2), seed=i),
            ignore_eos=True,
        )
        for i in range(len(LENGTHS))
    ]


def alone(engine: Engine, shape: DraftShape | None) -> list[Any]:
    """What becomes of every prompt by itself."""
    return [
        outputs(records(engine, [prompt], [asked], shape))[0]
        for prompt, asked in zip(prompts(), params(), strict=True)
    ]


def forward(path: Path, ids: tuple[int, ...]) -> Forward:
    """Transformers' logits [T, V] of one sequence, in fp32 and with parameters in bf16."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = theirs.eval().cuda()
    head = theirs.get_output_embeddings().weight.data.clone()

    @torch.no_grad()
    def logits() -> np.ndarray:
        states = theirs.model(torch.tensor([ids], device="cuda"), use_cache=False)
        return (states.last_hidden_state[0].float() @ head.T).cpu().numpy()

    fp32 = logits()
    # The parameters only: positions times rounded frequencies would be other positions.
    for parameter in theirs.model.parameters():
        parameter.data = parameter.data.bfloat16()
    return Forward(ids, fp32, logits())


def test_scores_and_choices_are_as_near_to_fp32_as_bf16_allows(model: Model) -> None:
    """By the kernels that verify; then prompts' kernels and steps, whose tokens these score."""
    torch.backends.cuda.matmul.allow_tf32 = False
    greedy = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    (record,) = records(model.engine, prompts()[1:2], greedy, None)
    ids = (*(prompts()[1].prompt_ids or ()), *record.output_ids)
    wanted = forward(model.path, ids)
    check_errors(scores(model.engine, wanted), wanted)
    if model.engine.manifest.target.moe is None:
        # Where an expert changes its place, in bf16 too, no choice is without doubt.
        check_choices(scores(model.engine, wanted), wanted)
    rows = np.arange(LENGTHS[1] - 1, len(ids) - 1)
    near, chosen = near_tie(wanted), np.array(record.output_ids)
    assert (wanted.fp32[rows].max(axis=1) - wanted.fp32[rows, chosen]).max() < near
    shifted = wanted.fp32[rows] - wanted.fp32[rows].max(axis=1, keepdims=True)
    logprobs = shifted[np.arange(len(rows)), chosen] - np.log(np.exp(shifted).sum(axis=1))
    assert np.abs(logprobs - np.array(record.logprobs)).max() < near


def test_the_cpu_engine_agrees_but_for_near_ties(model: Model) -> None:
    output = model.path.parent / "cpu"
    build(
        BuildOptions.from_flat(model=model.path, output=output, backend="cpu", max_seq_len=512),
        SilentProgress(),
    )
    cpu, greedy = Engine.load(output), GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    (ours,) = records(model.engine, prompts()[2:3], greedy, None)
    ids = (*(prompts()[2].prompt_ids or ()), *ours.output_ids)
    theirs = np.concatenate([scored.logits for scored in cpu.decoder.score(ids)])
    wanted = forward(model.path, ids)
    np.testing.assert_allclose(theirs, wanted.fp32, atol=1e-2)
    rows = np.arange(LENGTHS[2] - 1, len(ids) - 1)
    lost = theirs[rows].max(axis=1) - theirs[rows, np.array(ours.output_ids)]
    assert lost.max() < near_tie(wanted)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_and_neighbours_change_no_bit(model: Model, shape: DraftShape) -> None:
    plain = alone(model.engine, None)
    assert outputs(records(model.engine, prompts(), params(), None)) == plain
    assert alone(model.engine, shape) == plain
    together = records(model.engine, prompts(), params(), shape)
    assert outputs(together) == plain
    accepted = sum(sum(record.stats.acceptance_histogram[1:]) for record in together)
    assert accepted > 0


def test_cuts_of_a_prompt_change_no_bit(model: Model) -> None:
    assert isinstance(model.engine.executor, CudaExecutor)
    plain = alone(model.engine, None)
    for seed in range(4):
        with cut_at_random(seed, 2 * max(LENGTHS)) as launched:
            together = outputs(records(model.engine, prompts(), params(), None))
        assert together == plain, f"launches of {launched} rows"
