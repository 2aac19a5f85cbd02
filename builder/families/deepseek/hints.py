"""Hints for checkpoints whose config does not match DeepSeek's tensors."""

from __future__ import annotations

import re

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.hints import LAYER, layer_hints
from specbuild.builder.families.deepseek.variants import VARIANTS
from specbuild.runtime.engine_dir.feed_forward import routed_part
from specbuild.runtime.engine_dir.geometry import TargetGeometry

EXPERT = re.compile(r"\.mlp\.experts\.(\d{1,6})\.")


def mla_hints(_config: Config, names: list[str]) -> list[str]:
    """Return a hint if another family's config lies beside DeepSeek's tensors."""
    if any("kv_a_proj" in name or "kv_b_proj" in name for name in names):
        return [
            "the shards hold MLA attention, which needs a config.json of model_type "
            f"{', '.join(VARIANTS)}"
        ]
    return []


def feed_forward_hints(g: TargetGeometry, names: list[str]) -> list[str]:
    """Return hints why the tensors do not match the geometry."""
    hints = []
    expected = {i for i in range(g.layers) if routed_part(g.feed_forward(i)) is not None}
    routed, dense = (_layers_with(names, part) for part in (".mlp.experts.", ".mlp.gate_proj."))
    for kind, misfits, stored in (
        ("a dense MLP", {i for i in routed if i < g.layers} - expected, "mlp.experts.*"),
        ("experts", dense & expected, "a dense mlp.gate_proj"),
    ):
        if misfits:
            hints.append(
                f"config.json says that layers {', '.join(map(str, sorted(misfits)))} have {kind} "
                "(first_k_dense_replace or mlp_layer_types, n_routed_experts), but the shards hold "
                f"{stored} there: the config does not belong to these weights"
            )
    experts = {int(m[1]) for name in names if (m := EXPERT.search(name))}
    if experts and g.moe is not None and len(experts) != g.moe.experts:
        hints.append(f"the shards hold {len(experts)} experts, config.json says {g.moe.experts}")
    hints += layer_hints(g, names)
    return hints


def _layers_with(names: list[str], part: str) -> set[int]:
    return {int(match[1]) for name in names if part in name and (match := LAYER.match(name))}
