"""Hints for checkpoints whose config does not match GPT-OSS's tensors."""

from __future__ import annotations

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.hints import layer_hints
from specbuild.builder.families.gpt_oss.geometry import experts_of
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def experts_hints(config: Config, names: list[str]) -> list[str]:
    """Return a hint if a dense model's config lies beside GPT-OSS's tensors."""
    if not any(".mlp.experts." in name for name in names) or not _is_dense(config):
        return []
    return [
        f"the config describes {', '.join(config.texts('architectures')) or 'a model'} with a "
        "dense MLP, but the shards hold mlp.experts.* and mlp.router.*: the config does not "
        "belong to these weights"
    ]


def mismatch_hints(g: TargetGeometry, names: list[str]) -> list[str]:
    """Return hints why the tensors do not match the geometry."""
    hints = []
    packed = any(name.endswith("_proj_blocks") for name in names)
    if packed and experts_of(g).storage == "bf16":
        hints.append("the shards hold MXFP4 experts, but config.json has no quantization_config")
    if experts_of(g).storage == "mxfp4" and any(
        name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in names
    ):
        hints.append(
            "config.json says MXFP4, but the shards hold dense experts; "
            "remove its quantization_config"
        )
    hints += layer_hints(g, names)
    if any(".mlp.gate_proj." in name for name in names):
        hints.append("the shards hold a dense MLP, but GPT-OSS has experts")
    return hints


def _is_dense(config: Config) -> bool:
    """Return whether the config describes a model without experts.

    A Llama's config may have unused fields for experts.
    """
    dense_family = any(name.startswith("Llama") for name in config.texts("architectures"))
    return dense_family or not any("experts" in field for field in config.fields)
