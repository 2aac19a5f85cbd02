"""Known ways in which a configuration and its shards do not belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specbuild.builder.checkpoint.config_json import Config
from specbuild.runtime.engine_dir.manifest import TargetGeometry

LAYER = re.compile(r"(?:model\.layers|block)\.(\d+)\.")
EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
DRAFT_NAMES = ("midlayer.", "fc.weight", "d2t", "t2d")
DRAFT_HINT = "the shards hold an EAGLE3 draft; give it with --draft, and its target as --model"


def looks_like_draft(names: Iterable[str]) -> bool:
    """Whether the tensor names are those of an EAGLE3 draft."""
    return any(name.startswith(DRAFT_NAMES) for name in names)


def wrong_model_hints(config: Config, names: Iterable[str]) -> list[str]:
    """Why a configuration that is not GPT-OSS's may lie over these tensors."""
    names = list(names)
    hints = [DRAFT_HINT] if looks_like_draft(names) else []
    if any(".mlp.experts." in name for name in names) and _is_dense(config):
        hints.append(
            f"the config describes {', '.join(config.texts('architectures')) or 'a model'} with a "
            "dense MLP, but the shards hold mlp.experts.* and mlp.router.*: the config does not "
            "belong to these weights, and every MLP would be left without its own"
        )
    return hints + _attention_hints(names)


def mismatch_hints(g: TargetGeometry, names: Iterable[str]) -> list[str]:
    """What may explain that the tensors are not those of the geometry."""
    names = list(names)
    hints = [DRAFT_HINT] if looks_like_draft(names) else []
    packed = any(name.endswith("_proj_blocks") for name in names)
    if packed and g.expert_format == "bf16":
        hints.append("the shards hold MXFP4 experts, but config.json has no quantization_config")
    if g.expert_format == "mxfp4" and any(
        name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in names
    ):
        hints.append(
            "config.json says MXFP4, but the shards hold dense experts; "
            "remove its quantization_config"
        )
    numbers = {int(match[1]) for match in map(LAYER.match, names) if match}
    if numbers and max(numbers) + 1 != g.layers:
        hints.append(f"the shards hold {max(numbers) + 1} layers, config.json says {g.layers}")
    if any(".mlp.gate_proj." in name for name in names):
        hints.append("the shards hold a dense MLP, GPT-OSS has experts")
    return hints + _attention_hints(names)


def feed_forward_hints(g: TargetGeometry, names: Iterable[str]) -> list[str]:
    """What may explain that a DeepSeek's tensors are not those of the geometry."""
    assert g.feed_forward is not None
    names = list(names)
    hints = [DRAFT_HINT] if looks_like_draft(names) else []
    first = g.feed_forward.dense_layers
    routed, dense = (_layers_with(names, part) for part in (".mlp.experts.", ".mlp.gate_proj."))
    for kind, wrong, unlike in (
        ("a dense MLP", {i for i in routed if i < first}, "mlp.experts.*"),
        ("experts", {i for i in dense if first <= i < g.layers}, "a dense mlp.gate_proj"),
    ):
        if wrong:
            hints.append(
                f"config.json says that layers {', '.join(map(str, sorted(wrong)))} have {kind} "
                f"(first_k_dense_replace, n_routed_experts), but the shards hold {unlike} there: "
                "the config does not belong to these weights"
            )
    found = {int(m[1]) for name in names if (m := EXPERT.search(name))}
    if found and first < g.layers and len(found) != g.experts:
        hints.append(f"the shards hold {len(found)} experts, config.json says {g.experts}")
    numbers = {int(match[1]) for match in map(LAYER.match, names) if match}
    if numbers and max(numbers) + 1 != g.layers:
        hints.append(f"the shards hold {max(numbers) + 1} layers, config.json says {g.layers}")
    if any(name.endswith("_scale_inv") for name in names):
        hints.append("the shards hold FP8 weights with scales; convert them to bf16 first")
    return hints


def _layers_with(names: list[str], part: str) -> set[int]:
    return {int(match[1]) for name in names if part in name and (match := LAYER.match(name))}


def _is_dense(config: Config) -> bool:
    """Whether the configuration describes a model without experts, stray fields aside."""
    dense_family = any(name.startswith("Llama") for name in config.texts("architectures"))
    return dense_family or not any("experts" in field for field in config.fields)


def _attention_hints(names: list[str]) -> list[str]:
    if any("kv_a_proj" in name or "kv_b_proj" in name for name in names):
        return [
            "the shards hold MLA attention, which is built for a config.json of model_type "
            "deepseek_v3 only"
        ]
    return []
