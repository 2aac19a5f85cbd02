"""Reads GPT-OSS checkpoints in Hugging Face's layout or in OpenAI's original one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from specbuild.builder.checkpoint.config_fields import check_fields
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.rope import read_positions, read_rope
from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.builder.checkpoint.target_parts import read_eos
from specbuild.builder.families.gpt_oss import original_layout
from specbuild.builder.families.gpt_oss.config_fields import (
    GPT_OSS,
    GPT_OSS_ORIGINAL,
    MXFP4_QUANTIZATION,
)
from specbuild.builder.families.gpt_oss.geometry import (
    ATTENTION_PARTS,
    experts_of,
    feed_forward,
    norm,
)
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import LongRopeScaling
from specbuild.runtime.errors import SpecbuildError

DEFAULT_THETA = 150000.0
LAYER_TYPES = ("sliding_attention", "full_attention")


def is_original(config: Config) -> bool:
    """Return whether the config is that of OpenAI's original layout."""
    return original_layout.is_original(config.fields)


def read_gpt_oss_config(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    """Return the geometry and warnings, for either layout.

    Raises SpecbuildError for unsupported or inconsistent values.
    """
    read = _read_original if is_original(config) else _read_hf
    geometry, warnings = read(path, config, strict=strict)
    _check_geometry(config.where, geometry)
    return geometry, warnings


def canonical_tensors(
    tensors: dict[str, SourceTensor], g: TargetGeometry, config: Config
) -> tuple[dict[str, SourceTensor], tuple[str, ...]]:
    """Return the tensors under their names in Hugging Face's layout."""
    if not is_original(config):
        return tensors, ()
    q_rows, kv_rows = g.q_heads * g.head_dim, g.kv_heads * g.head_dim
    return original_layout.to_canonical(tensors, q_rows=q_rows, kv_rows=kv_rows), ()


def text_roots(path: Path, config: Config) -> tuple[Path, ...]:
    """Return the folders of tokenizer files; releases have the original layout in a subfolder."""
    nested = is_original(config) and path.resolve().name == "original"
    return (path, path.resolve().parent) if nested else (path,)


def _read_hf(path: Path, config: Config, *, strict: bool) -> tuple[TargetGeometry, tuple[str, ...]]:
    warnings = check_fields(config, GPT_OSS, strict=strict)
    storage, quantization_warnings = _read_quantization(config, strict=strict)
    layers = config.count("num_hidden_layers")
    layer_types = _read_layer_types(config, layers)
    sliding = "sliding_attention" in layer_types
    bias = config.boolean("attention_bias", True)
    rope = read_rope(config, default_theta=DEFAULT_THETA, required=True)
    geometry = TargetGeometry(
        model_type="gpt_oss",
        layers=layers,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        q_heads=config.integer("num_attention_heads"),
        kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
        attention=dataclasses.replace(ATTENTION_PARTS, qkv_bias=bias, output_bias=bias),
        norm=norm(config.number("rms_norm_eps", 1e-5)),
        rope=rope,
        layer_types=layer_types,
        sliding_window=config.integer("sliding_window", None if sliding else 0, least=int(sliding)),
        feed_forwards=(
            feed_forward(
                experts=_aliased_count(config, "num_local_experts", "num_experts"),
                experts_per_token=_aliased_count(
                    config, "num_experts_per_tok", "experts_per_token"
                ),
                inner=config.integer("intermediate_size"),
                storage=storage,
                limit=config.number("swiglu_limit", 7.0),
            ),
        ),
        layer_feed_forwards=(0,) * layers,
        max_positions=read_positions(config, rope),
        tied_head=config.boolean("tie_word_embeddings", False),
        eos_token_ids=read_eos((path,), config),
    )
    return geometry, warnings + quantization_warnings


def _read_original(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    warnings = check_fields(config, GPT_OSS_ORIGINAL, strict=strict)
    layers = config.count("num_hidden_layers")
    rope = original_layout.read_rope(config)
    geometry = TargetGeometry(
        model_type="gpt_oss",
        layers=layers,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        q_heads=config.integer("num_attention_heads"),
        kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
        attention=ATTENTION_PARTS,
        norm=norm(original_layout.RMS_EPS),
        rope=rope,
        layer_types=_alternating_types(layers),
        sliding_window=config.integer("sliding_window"),
        feed_forwards=(
            feed_forward(
                experts=config.count("num_experts"),
                experts_per_token=config.count("experts_per_token"),
                inner=config.integer("intermediate_size"),
                storage="mxfp4",
                limit=config.number("swiglu_limit", 7.0),
            ),
        ),
        layer_feed_forwards=(0,) * layers,
        max_positions=int(config.integer("initial_context_length") * _context_factor(rope)),
        tied_head=False,
        eos_token_ids=read_eos(text_roots(path, config), config),
    )
    if not geometry.eos_token_ids and geometry.vocab == original_layout.RELEASE_VOCAB:
        geometry = dataclasses.replace(geometry, eos_token_ids=original_layout.RELEASE_EOS)
        warnings += (
            "target: the checkpoint defines no EOS token; the build uses the release's "
            f"{geometry.eos_token_ids}",
        )
    return geometry, warnings


def _context_factor(rope: Rope) -> float:
    scaling = rope.scaling
    return 1.0 if scaling is None or isinstance(scaling, LongRopeScaling) else scaling.factor


def _read_quantization(
    config: Config, *, strict: bool
) -> tuple[Literal["mxfp4", "bf16"], tuple[str, ...]]:
    if config.get("quantization_config") is None:
        return "bf16", ()
    section = config.section("quantization_config")
    if section.get("quant_method") != "mxfp4":
        raise section.wrong("quant_method", "'mxfp4', or no quantization_config")
    return "mxfp4", check_fields(section, MXFP4_QUANTIZATION, strict=strict)


def _alternating_types(layers: int) -> tuple[str, ...]:
    return tuple(LAYER_TYPES[layer % 2] for layer in range(layers))


def _read_layer_types(config: Config, layers: int) -> tuple[str, ...]:
    if config.get("layer_types") is None:
        return _alternating_types(layers)
    listed = config.texts("layer_types")
    if len(listed) != layers or not set(listed) <= set(LAYER_TYPES):
        raise config.wrong("layer_types", f"{layers} of {' or '.join(LAYER_TYPES)}")
    return listed


def _aliased_count(config: Config, name: str, alias: str) -> int:
    """Return a count that has two field names; their values must be equal if both are present."""
    values: set[int] = {config.count(n) for n in (name, alias) if config.get(n) is not None}
    if len(values) > 1:
        raise config.wrong(name, f"the value of {alias}, {config.get(alias)!r}")
    return values.pop() if values else config.count(name)


def _check_geometry(where: str, g: TargetGeometry) -> None:
    problems, moe = [], experts_of(g)
    if g.q_heads % g.kv_heads:
        problems.append(f"{g.q_heads} query heads are not a multiple of {g.kv_heads} KV heads")
    if g.head_dim % 2:
        problems.append(f"head_dim {g.head_dim} is odd, but rotary embedding needs pairs")
    if moe.experts_per_token > moe.experts:
        problems.append(
            f"{moe.experts_per_token} experts per token, but only {moe.experts} experts"
        )
    if moe.storage == "mxfp4" and (g.hidden % 32 or moe.inner % 32):
        problems.append(
            f"MXFP4 needs multiples of 32, got hidden_size {g.hidden} and intermediate_size "
            f"{moe.inner}"
        )
    if problems:
        raise SpecbuildError(f"{where}: {'; '.join(problems)}")
