"""One case for each kind of drafter: a tiny model with its draft, a reference, an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from checkpoints import write_draft, write_target
from deepseek_checkpoints import add_predictor, write_deepseek
from dflash_drafts import BLOCK, MASK_TOKEN, PlainDFlash, write_dflash
from drafter_references import OnePass, Recurrent, Reference, fields_of, recurrent_of
from gemma4_assistants import write_assistant
from llama_checkpoints import write_llama
from mimo_checkpoints import PlainMimoMtp, write_mimo
from p_eagle_drafts import MASK_TOKEN as P_EAGLE_MASK
from p_eagle_drafts import PlainPEagle, write_p_eagle
from qwen_predictors import add_qwen_predictor

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.eagle3.reference import ReferenceDraft
from specbuild.builder.families.gemma4_assistant.reference import read_reference as read_assistant
from specbuild.builder.families.mtp.reference import load_reference_mtp
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.frozen_target import load_target
from specbuild.runtime.engine_dir.manifest import DraftShape

VOCAB, MTP_VOCAB, LAYERS = 48, 32, 2
MTP = Path("mtp")
CHAIN, TREE = DraftShape(1, 4, 4), DraftShape(3, 4, 12)
# Only tests that compare with the engine's reference pay for its computation.
Written: TypeAlias = tuple[Path, Callable[[], Reference]]


@dataclass(frozen=True)
class DrafterCase:
    """A kind of drafter.

    ``write(folder, cuda)`` writes ``folder / "model"`` and the draft, in fp32, or for CUDA in bf16
    with sizes that kernels support. It returns the arguments of ``--draft``, and the reference.
    ``geometry`` has fields of the drafter's geometry in the manifest, ``feature`` is the manifest's
    feature. ``shown`` is a part of the output of ``inspect``, and ``stages`` are those that
    ``verify`` compares. ``stored`` maps tensors of the engine to the checkpoint's tensors that they
    are made of.
    """

    write: Callable[[Path, bool], Written]
    kind: str
    shown: str
    stages: tuple[str, ...]
    chain: DraftShape = CHAIN
    tree: DraftShape = TREE
    feature: str | None = None
    geometry: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)


def _gpt_oss(folder: Path, cuda: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a random model; return its embedding and its head."""
    sizes = {"head_dim": 32} if cuda else {"dtype": "f32", "experts_format": "bf16"}
    tensors = write_target(folder / "model", vocab=VOCAB, **sizes)
    embedding, head = (tensors[n] for n in ("model.embed_tokens.weight", "lm_head.weight"))
    return embedding.float(), head.float()


def _small(cuda: bool) -> dict[str, Any]:
    return {"target_vocab": VOCAB, "draft_vocab": 32, "dtype": "bf16" if cuda else "f32"}


def _eagle3(folder: Path, cuda: bool) -> Written:
    embedding, head = _gpt_oss(folder, cuda)
    tensors, path = write_draft(folder / "draft", **_small(cuda)), folder / "draft"

    def reference() -> Reference:
        draft = ReferenceDraft(fields_of(path), tensors, embedding=embedding, head=head)
        return recurrent_of(draft, draft.target_ids)

    return path, reference


def _p_eagle(folder: Path, cuda: bool, **options: Any) -> Written:
    embedding, _ = _gpt_oss(folder, cuda)
    tensors = write_p_eagle(folder / "draft", **_small(cuda), **options)
    target_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    return folder / "draft", lambda: OnePass(PlainPEagle(tensors, embedding).logits, target_ids)


def _dflash(folder: Path, cuda: bool, *, causal: bool = False, **options: Any) -> Written:
    shared = _gpt_oss(folder, cuda)
    dtype = torch.bfloat16 if cuda else torch.float32
    tensors = write_dflash(folder / "draft", vocab=VOCAB, dtype=dtype, causal=causal, **options)
    plain = PlainDFlash(tensors, *shared, first=0 if options.get("config_changes") else 1)

    def run(states: torch.Tensor, ids: torch.Tensor, depth: int) -> torch.Tensor:
        return plain.logits(states, int(ids[-1]), causal=causal)[:depth]

    return folder / "draft", lambda: OnePass(run, torch.arange(VOCAB))


# On CUDA: dense layers that two ranks can share, and latents that kernels take.
_LATENTS = {
    "intermediate_size": 128,
    "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "first_k_dense_replace": LAYERS + 1, "dtype": "bfloat16",
}  # fmt: skip


def _deepseek(folder: Path, cuda: bool, q_lora_rank: int | None = 32) -> Written:
    path = folder / "model"
    write_deepseek(path, **({**_LATENTS, "q_lora_rank": q_lora_rank} if cuda else {}))
    add_predictor(path, layers=LAYERS)

    def reference() -> Reference:
        target = load_target(path, teacher=False).float()
        draft = load_reference_mtp(path, target, fields_of(path))
        return recurrent_of(draft, torch.arange(MTP_VOCAB))

    return MTP, reference


def _mimo(folder: Path, cuda: bool) -> Written:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    kernels = {"dtype": "bfloat16", "head_dim": 32, "intermediate_size": 128}
    sizes: dict[str, Any] = kernels if cuda else {}
    tensors = write_mimo(folder / "model", num_hidden_layers=LAYERS, rope_parameters=rope, **sizes)
    plain = PlainMimoMtp(tensors, heads=4, kv_heads=2, eps=0.02, theta=500.0)

    def run(states: torch.Tensor, ids: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
        scale = (states.square().mean(dim=1, keepdim=True) + plain.eps).rsqrt()
        fused = states * scale * plain.w["model.norm.weight"]
        return plain.follow(fused, ids[1:].tolist(), list(path))

    return MTP, lambda: Recurrent(run, torch.arange(MTP_VOCAB))


def _qwen(folder: Path, cuda: bool) -> Written:
    """Write a model whose last layer has keys and values, after layers with recurrent states."""
    path, types = folder / "model", ["linear_attention", "full_attention"]
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "layer_types": types}
    if cuda:
        sizes |= {
            "dtype": "bfloat16", "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "head_dim": 32,
        }  # fmt: skip
    write_llama(path, "qwen3_5_text", **sizes)
    add_qwen_predictor(path, like=1)

    def reference() -> Reference:
        target = load_target(path, teacher=False).float()
        draft = load_reference_mtp(path, target, fields_of(path))
        return recurrent_of(draft, torch.arange(MTP_VOCAB))

    return MTP, reference


def _gemma4(folder: Path, cuda: bool, *, clustered: bool = False) -> Written:
    """Write layers with a window and without, and an assistant that reads one of each.

    A ``clustered`` head reads all clusters, because rounding may select others near a tie.
    """
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes: dict[str, Any] = {"num_hidden_layers": len(types), "layer_types": types}
    dtype = "bfloat16" if cuda else "float32"
    write_llama(folder / "model", "gemma4_text", dtype=dtype, **sizes)
    write_assistant(
        folder / "draft", target=sizes, dtype=dtype, sharpness=0.3, intermediate_size=96,
        clustered=clustered, read_clusters=8,
    )  # fmt: skip

    def reference() -> Reference:
        target = load_target(folder / "model", teacher=False).float()
        read = read_draft(folder / "draft", read_target(folder / "model", strict=True).geometry,
                          strict=True)  # fmt: skip
        draft = read_assistant(folder / "draft", target, read.geometry, folder)

        def run(states: torch.Tensor, ids: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
            state, drafted = target.model.norm(states[-1]), torch.tensor(path).long()
            return draft.levels(ids[:-1], int(ids[-1]), drafted, state).logits

        return Recurrent(run, torch.arange(MTP_VOCAB))

    return folder / "draft", reference


_LEVELS = ("aux hidden states", "fuse", "draft attention", "draft ffn", "draft pre_head")
_BLOCKS: dict[str, Any] = {
    "chain": DraftShape(1, BLOCK - 1, BLOCK - 1),
    "feature": "dflash",
    "geometry": {"block_size": BLOCK},
    "stored": {"draft.fc.weight": "fc.weight"},
}
_MTP: dict[str, Any] = {
    "kind": "mtp",
    "shown": "MTP layer of the model",
    "stages": _LEVELS,
    "feature": "mtp",
    "geometry": {"aux_layers": [LAYERS - 1]},
}
CASES: dict[str, DrafterCase] = {
    "eagle3": DrafterCase(
        _eagle3,
        "eagle3",
        "LlamaForCausalLMEagle3",
        _LEVELS,
        stored={"draft.fc.weight": "fc.weight"},
    ),
    "p-eagle": DrafterCase(
        _p_eagle,
        "p-eagle",
        "P-EAGLE",
        ("draft mask rows",),
        chain=DraftShape(1, 7, 7),
        feature="p_eagle",
        geometry={"mask_token": P_EAGLE_MASK},
        stored={"draft.mask_state": "mask_hidden"},
    ),
    "dflash": DrafterCase(
        _dflash,
        "dflash",
        f"DFlash, non-causal; blocks of {BLOCK}, mask {MASK_TOKEN}",
        ("draft block",),
        **_BLOCKS,
    ),
    "jetspec": DrafterCase(
        functools.partial(_dflash, causal=True),
        "dflash",
        "JetSpec, causal",
        ("draft block",),
        **_BLOCKS,
    ),
    "mtp of DeepSeek-V3": DrafterCase(
        _deepseek, stored={"draft.eh_proj.weight": f"model.layers.{LAYERS}.eh_proj.weight"}, **_MTP
    ),
    "mtp of MiMo": DrafterCase(
        _mimo, stored={"draft.eh_proj.weight": "model.mtp_layers.0.input_proj.weight"}, **_MTP
    ),
}


def _variant(name: str, write: Callable[..., Written], **options: Any) -> DrafterCase:
    return replace(CASES[name], write=functools.partial(write, **options))


# DSpark's rows: the root's row drafts level 1.
ANCHOR: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}

# Variants of a kind that draft by the same formulas.
CPU_VARIANTS = {
    "p-eagle, four layers": _variant(
        "p-eagle", _p_eagle, layers=4, prefix="layers.0", spelling="ptd_token_id"
    ),
    "p-eagle, two layers, normed states": _variant("p-eagle", _p_eagle, layers=2, fc_norm=True),
    "p-eagle, one norm before": _variant("p-eagle", _p_eagle, norm_before_fc=True),
    "dflash, one layer without norms": _variant("dflash", _dflash, layers=1, normed=False),
    "jetspec, four layers": _variant("jetspec", _dflash, layers=4, causal=True),
    "dspark without a Markov head": _variant("dflash", _dflash, config_changes=ANCHOR),
    "dspark without a Markov head, causal": _variant(
        "jetspec", _dflash, causal=True, config_changes=ANCHOR
    ),
}
CUDA_VARIANTS = {
    "dflash, without norms": _variant("dflash", _dflash, normed=False),
    "dspark without a Markov head": _variant("dflash", _dflash, config_changes=ANCHOR),
    "mtp of DeepSeek-V3, without query latents": _variant(
        "mtp of DeepSeek-V3", _deepseek, q_lora_rank=None
    ),
    "mtp of Qwen3.5": _variant("mtp of MiMo", _qwen),
    "assistant of Gemma 4": DrafterCase(_gemma4, "gemma4-assistant", "assistant", ()),
    "assistant of Gemma 4 with clusters": DrafterCase(
        functools.partial(_gemma4, clustered=True), "gemma4-assistant", "assistant", ()
    ),
}


def build_case(case: DrafterCase, folder: Path) -> Written:
    """Write the checkpoints and build their engine at ``folder / "engine"``."""
    draft, reference = case.write(folder, False)
    options = BuildOptions(
        model=folder / "model",
        draft=draft,
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=128, max_batch_size=3),
    )
    build(options, SilentProgress())
    return draft, reference
