"""Known ways in which a configuration and a GPT-OSS's tensors do not belong together."""

from __future__ import annotations

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.hints import layer_hints
from specbuild.builder.families.gpt_oss.geometry import experts_of
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def experts_hints(config: Config, names: list[str]) -> list[str]:
    """Why a configuration that is not GPT-OSS's may lie over these tensors."""
    if not any(".mlp.experts." in name for name in names) or not _is_dense(config):
        return []
    return [
        f"the config describes {', '.join(config.texts('architectures')) or 'a model'} with a "
        "dense MLP, but the shards hold mlp.experts.* and mlp.router.*: the config does not "
        "belong to these weights, and every MLP would be left without its own"
    ]


def mismatch_hints(g: TargetGeometry, names: list[str]) -> list[str]:
    """What may explain that the tensors are not those of the geometry."""
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
        hints.append("the shards hold a dense MLP, GPT-OSS has experts")
    return hints


def _is_dense(config: Config) -> bool:
    """Whether the configuration describes a model without experts, stray fields aside."""
    dense_family = any(name.startswith("Llama") for name in config.texts("architectures"))
    return dense_family or not any("experts" in field for field in config.fields)
