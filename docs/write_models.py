"""Write the table of docs/models.md: what is built of which model, and what has been run where.

.venv/bin/python docs/write_models.py

The backends' own checks decide what is refused, with the published sizes. ``RUN`` lists what has
run, each with the test or record that proves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from generated_tables import markdown_table, replace_table

from specbuild.builder.backends.registry import BACKENDS
from specbuild.builder.families.eagle3.synth import draft_geometry
from specbuild.builder.families.family import DraftSizes
from specbuild.builder.families.gemma4_assistant.synth import ASSISTANT_SYNTH
from specbuild.builder.families.registry import TARGETS
from specbuild.builder.options import BuildOptions
from specbuild.builder.synth.geometry import named_geometry
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import AttentionParts, MlaGeometry, Norm, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

PAGE = Path(__file__).with_name("models.md")

# A published model of every type: its title, and the geometry that the backends' checks receive.
MODELS = {
    "gpt_oss": ("GPT-OSS 20B, 120B", "gpt-oss-20b"),
    "llama": ("Llama 3", "llama-3.1-8b"),
    "qwen2": ("Qwen2, Qwen2.5", "mimo-7b"),
    "qwen3": ("Qwen3, dense", "qwen3-8b"),
    "qwen3_moe": ("Qwen3-MoE", "qwen3-30b-a3b"),
    "mimo": ("MiMo-7B", "mimo-7b"),
    "qwen3_vl_text": ("Qwen3-VL, text part", "qwen3-8b"),
    "mistral": ("Mistral, Mistral Small 3", "mistral-small-24b"),
    "ministral3": ("Ministral 3, Devstral 2", "ministral-3-8b"),
    "mixtral": ("Mixtral", "mixtral-8x7b"),
    "smollm3": ("SmolLM3", "smollm3-3b"),
    "phi3": ("Phi-4", "phi-4"),
    "olmo2": ("OLMo 2", "olmo-2-7b"),
    "olmo3": ("OLMo 3", "olmo-3-7b"),
    "granite": ("Granite 3", "granite-3.3-8b"),
    "gemma3_text": ("Gemma 3", "gemma-3-27b"),
    "gemma4_text": ("Gemma 4", "gemma-4-31b"),
    "gemma4_unified_text": ("Gemma 4 12B", "gemma-4-31b"),
    "glm4_moe": ("GLM-4.5, 4.6, 4.7", "glm-4.5-air"),
    "minimax_m2": ("MiniMax-M2", "minimax-m2"),
    "qwen3_5_text": ("Qwen3.5, 3.6, 3.8, dense", "qwen3.5-27b"),
    "qwen3_5_moe_text": ("Qwen3.5, 3.6, 3.8, experts", "qwen3.5-35b-a3b"),
    "qwen3_next": ("Qwen3-Next", "qwen3-next-80b-a3b"),
    "deepseek_v2": ("DeepSeek-V2", "deepseek-v2-lite"),
    "deepseek_v3": ("DeepSeek-V3, R1", "glm-4.7-flash"),
    "kimi_k2": ("Kimi-K2", "glm-4.7-flash"),
    "glm4_moe_lite": ("GLM-4.7-Flash", "glm-4.7-flash"),
    "youtu": ("Youtu-LLM", "youtu-2b"),
}
# Model types with the same reader as another; the published configuration has the second name.
SPELLINGS = {"youtu_llm": "youtu"}
# GGUF architectures whose name differs from the model type, or that several families share.
GGUF = {
    "mistral": ("llama",),
    "ministral3": ("mistral3",),
    "mixtral": ("llama",),
    "olmo3": ("olmo2",),
    "gemma3_text": ("gemma3",),
    "gemma4_text": ("gemma4",),
    "gemma4_unified_text": (),
    "glm4_moe": ("glm4moe",),
    "minimax_m2": ("minimax-m2",),
    "qwen3_5_text": ("qwen35",),
    "qwen3_5_moe_text": ("qwen35moe",),
    "qwen3_next": ("qwen3next",),
}
# Storage types of a checkpoint in addition to bf16, fp16 and fp32.
STORED = {
    "gpt_oss": "MXFP4 experts",
}
MTP_LAYERS = (
    "deepseek_v3",
    "glm4_moe_lite",
    "mimo",
    "glm4_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)
ASSISTED = ("gemma4_text", "gemma4_unified_text")
_GROUPED_TESTS = "tests/e2e/test_grouped_families.py"
_MLA_TESTS = "tests/e2e/test_mla_families.py"
_GROUPED_ON_CUDA = "benchmarks/results/grouped-families-2026-11-28.txt"
_FAMILIES_ON_CUDA = "benchmarks/results/families-2026-11-29.txt"
_HYBRID_ON_CUDA = "benchmarks/results/gated-delta-2026-11-28.txt"
_MLA_ON_CUDA = "benchmarks/results/h200-2026-11-26/mla.txt"
# What has decoded on each backend, with the test or record that proves it.
RUN = {
    ("cpu", "gpt_oss"): "tests/e2e/test_example.py",
    ("cpu", "llama"): "tests/e2e/test_llama.py",
    ("cpu", "qwen2"): "tests/e2e/test_llama.py",
    ("cpu", "qwen3"): "tests/e2e/test_llama.py",
    ("cpu", "qwen3_moe"): "tests/e2e/test_llama.py",
    ("cpu", "mimo"): "tests/e2e/test_mtp.py",
    ("cpu", "qwen3_vl_text"): "tests/unit/builder/checkpoint/test_text_part.py",
    ("cpu", "mistral"): _GROUPED_TESTS,
    ("cpu", "ministral3"): _GROUPED_TESTS,
    ("cpu", "mixtral"): _GROUPED_TESTS,
    ("cpu", "smollm3"): _GROUPED_TESTS,
    ("cpu", "phi3"): _GROUPED_TESTS,
    ("cpu", "olmo2"): _GROUPED_TESTS,
    ("cpu", "olmo3"): _GROUPED_TESTS,
    ("cpu", "granite"): _GROUPED_TESTS,
    ("cpu", "gemma3_text"): _GROUPED_TESTS,
    ("cpu", "gemma4_text"): _GROUPED_TESTS,
    ("cpu", "gemma4_unified_text"): _GROUPED_TESTS,
    ("cpu", "glm4_moe"): _GROUPED_TESTS,
    ("cpu", "minimax_m2"): _GROUPED_TESTS,
    ("cpu", "qwen3_5_text"): _GROUPED_TESTS,
    ("cpu", "qwen3_5_moe_text"): _GROUPED_TESTS,
    ("cpu", "qwen3_next"): _GROUPED_TESTS,
    ("cpu", "deepseek_v2"): _MLA_TESTS,
    ("cpu", "deepseek_v3"): "tests/e2e/test_deepseek.py",
    ("cpu", "kimi_k2"): _MLA_TESTS,
    ("cpu", "glm4_moe_lite"): _MLA_TESTS,
    ("cpu", "youtu"): _MLA_TESTS,
    ("cuda", "gpt_oss"): "benchmarks/results/h200-2026-11-24",
    ("cpu", "plain"): "tests/unit/builder/verify/test_verify_engine.py",
    ("cpu", "fc_norm"): "tests/unit/builder/verify/test_verify_engine.py",
    ("cpu", "norms"): "tests/unit/builder/verify/test_verify_engine.py",
    ("cpu", "parts"): "tests/unit/builder/verify/test_verify_engine.py",
    ("cpu", "layers"): "tests/unit/builder/verify/test_verify_engine.py",
    ("cpu", "mla"): "tests/unit/builder/verify/test_verify_engine.py",
    ("cpu", "p_eagle"): "tests/e2e/test_drafter_contract.py",
    ("cpu", "dflash"): "tests/e2e/test_dflash.py",
    ("cpu", "mtp"): "tests/e2e/test_mtp.py",
    ("cpu", "mtp_latents"): "tests/e2e/test_mtp.py",
    ("cpu", "assistant"): "tests/e2e/test_gemma4_assistant.py",
    ("cpu", "assistant_clusters"): "tests/e2e/test_gemma4_assistant.py",
    ("cuda", "llama"): "benchmarks/results/h200-2026-11-26/dense.txt",
    ("cuda", "qwen3"): "benchmarks/results/h200-2026-11-26/dense.txt",
    ("cuda", "mistral"): _GROUPED_ON_CUDA,
    ("cuda", "ministral3"): _GROUPED_ON_CUDA,
    ("cuda", "mixtral"): _GROUPED_ON_CUDA,
    ("cuda", "smollm3"): _GROUPED_ON_CUDA,
    ("cuda", "phi3"): _GROUPED_ON_CUDA,
    ("cuda", "olmo2"): _FAMILIES_ON_CUDA,
    ("cuda", "olmo3"): _FAMILIES_ON_CUDA,
    ("cuda", "granite"): _FAMILIES_ON_CUDA,
    ("cuda", "gemma3_text"): _FAMILIES_ON_CUDA,
    ("cuda", "gemma4_text"): _FAMILIES_ON_CUDA,
    ("cuda", "glm4_moe"): _FAMILIES_ON_CUDA,
    ("cuda", "minimax_m2"): _FAMILIES_ON_CUDA,
    ("cuda", "qwen3_5_text"): _HYBRID_ON_CUDA,
    ("cuda", "qwen3_5_moe_text"): _HYBRID_ON_CUDA,
    ("cuda", "qwen3_next"): "benchmarks/results/gated-delta-2026-11-29.txt",
    ("cuda", "qwen3_moe"): "benchmarks/results/h200-2026-11-26/dense.txt",
    ("cuda", "qwen2"): "benchmarks/results/h100-2026-11-26/mtp.txt",
    ("cuda", "mimo"): "benchmarks/results/h100-2026-11-26/mtp.txt",
    ("cuda", "assistant"): _FAMILIES_ON_CUDA,
    ("cuda", "assistant_clusters"): _FAMILIES_ON_CUDA,
    ("cuda", "mtp"): "benchmarks/results/h100-2026-11-26/mtp.txt",
    ("cuda", "p_eagle"): "benchmarks/results/h200-2026-11-26/p-eagle.txt",
    ("cuda", "dflash"): "benchmarks/results/dflash-2026-11-26.txt",
    ("cuda", "norms"): "benchmarks/results/h200-2026-11-26/dense.txt",
    ("cuda", "fc_norm"): "benchmarks/results/h200-2026-11-26/dense.txt",
    ("cuda", "plain"): "benchmarks/results/h200-2026-11-24",
    ("cuda", "deepseek_v2"): _MLA_ON_CUDA,
    ("cuda", "deepseek_v3"): _MLA_ON_CUDA,
    ("cuda", "glm4_moe_lite"): _MLA_ON_CUDA,
    ("cuda", "youtu"): _MLA_ON_CUDA,
    ("cuda", "mla"): _MLA_ON_CUDA,
    ("cuda", "mtp_latents"): _MLA_ON_CUDA,
}
DRAFTS = {
    "plain": "EAGLE3, a LLaMA layer",
    "norms": "EAGLE3 with `norm_before_fc`",
    "fc_norm": "EAGLE3 with `fc_norm`",
    "parts": "EAGLE3 with biases or `model_type: qwen3`",
    "layers": "EAGLE3 of several layers",
    "mla": "EAGLE3 with MLA",
    "p_eagle": "P-EAGLE of 1 to 4 layers",
    "dflash": "DFlash, JetSpec",
    "mtp": "MTP layer of the model",
    "mtp_latents": "MTP layer with MLA",
    "assistant": "Gemma 4's assistant",
    "assistant_clusters": "Gemma 4's assistant with clusters (E2B, E4B)",
}


def drafts_of(target: TargetGeometry) -> dict[str, DraftGeometry]:
    """A draft of each kind for ``target``."""
    plain = draft_geometry(target, DraftSizes(vocab=32000, inner=target.hidden))
    mla = MlaGeometry(512, 64, 128, 128, 192**-0.5, Norm(1e-6, "before_weight"), 1536)
    latent = replace(plain, mla=mla, kv_heads=1, head_dim=mla.entry_width)
    mtp = MtpGeometry(
        architecture="MiMoMTPModel", hidden=target.hidden, vocab=target.vocab,
        q_heads=target.q_heads, mla=None, feed_forward=target.feed_forward(0),
        rms_eps=target.norm.eps, rope=target.rope, aux_layers=(target.layers - 1,),
        max_positions=target.max_positions, kv_heads=target.kv_heads, key_width=target.head_dim,
    )  # fmt: skip
    dflash = DFlashGeometry(
        architecture="DFlashDraftModel", hidden=target.hidden, vocab=target.vocab,
        q_heads=target.q_heads, kv_heads=target.kv_heads, head_dim=target.head_dim,
        inner=target.hidden, layers=8, rms_eps=target.norm.eps, rope=target.rope,
        aux_layers=(1, 6), max_positions=target.max_positions, block_size=8, mask_token=1,
        causal=False, attention=AttentionParts(qk_norm="head"),
    )  # fmt: skip
    return {
        "plain": plain,
        "norms": replace(plain, norm_before_fc=True),
        "fc_norm": replace(plain, fc_norm=True),
        "parts": replace(plain, attention=AttentionParts(qkv_bias=True, qk_norm="head")),
        "layers": replace(plain, layers=2),
        "mla": latent,
        "p_eagle": PEagleGeometry(
            **vars(replace(plain, layers=4, architecture="PEagleDraftModel")), mask_token=1
        ),
        "dflash": dflash,
        "mtp": mtp,
        "mtp_latents": replace(mtp, mla=mla, kv_heads=1, key_width=0),
        "assistant": assistant_of("gemma-4-31b"),
        "assistant_clusters": assistant_of("gemma-4-e4b"),
    }


def assistant_of(name: str) -> DraftGeometry:
    """The assistant of a published Gemma 4."""
    return ASSISTANT_SYNTH.geometry(named_geometry(name).target, DraftSizes(vocab=0, inner=0))


def state(backend: str, kind: str, target: TargetGeometry, draft: DraftGeometry | None) -> str:
    """Return ``run``, ``not run`` if only the build is supported, or ``no`` if it is refused."""
    options = BuildOptions(model=Path("model"), output=Path("engine"))
    try:
        BACKENDS[backend].check(options, target, draft)  # type: ignore[index]
    except SpecbuildError:
        assert (backend, kind) not in RUN, (backend, kind)
        return "no"
    return "run" if (backend, kind) in RUN else "not run"


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each model type and for each kind of draft."""
    for family in TARGETS.values():
        for kind in family.model_types:
            if kind in SPELLINGS:
                continue
            names = [kind, *(other for other, of in SPELLINGS.items() if of == kind)]
            title, geometry = MODELS[kind]
            target = replace(named_geometry(geometry).target, model_type=kind)
            stored = f"safetensors, {STORED[kind]}" if kind in STORED else "safetensors"
            own = [name for name in family.gguf if fits(name, kind, family.model_types)]
            files = GGUF.get(kind, own)
            weights = f"{stored}; GGUF `{'`, `'.join(files)}`" if files else stored
            drafts = "EAGLE3, P-EAGLE, DFlash" + (", MTP" if kind in MTP_LAYERS else "")
            drafts += ", assistant" if kind in ASSISTED else ""
            result = [state(backend, kind, target, None) for backend in BACKENDS]
            yield title, f"`{'`, `'.join(names)}`", weights, drafts, *result
    target = named_geometry("gpt-oss-20b").target
    for kind, draft in drafts_of(target).items():
        yield (
            DRAFTS[kind],
            "",
            "safetensors",
            "",
            *[state(b, kind, target, draft) for b in BACKENDS],
        )


def fits(architecture: str, kind: str, kinds: object) -> bool:
    """Return whether a file of this architecture can hold a model of this type."""
    plain = {name.replace("_", "").replace("-", "") for name in kinds}  # type: ignore[attr-defined]
    named = architecture.replace("-", "")
    return named == kind.replace("_", "") or named not in plain


def table() -> str:
    """Return the table as Markdown."""
    header = ("model", "`model_type`", "weights", "drafts", *[f"`{name}`" for name in BACKENDS])
    return markdown_table(header, rows())


def page(text: str) -> str:
    """Return the page with the table replaced."""
    return replace_table(text, "models", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
