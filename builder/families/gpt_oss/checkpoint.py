"""Reads a target's checkpoint: geometry, tensors under canonical names, text files to carry."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Literal

from specbuild.builder.checkpoint.audit import audit
from specbuild.builder.checkpoint.config_fields import (
    ATTENTION,
    GPT_OSS,
    GPT_OSS_ORIGINAL,
    MXFP4_QUANTIZATION,
    check_fields,
)
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.hints import mismatch_hints, wrong_model_hints
from specbuild.builder.checkpoint.indexers import Indexers, read_indexers
from specbuild.builder.checkpoint.latents import Latents, read_latents
from specbuild.builder.checkpoint.rope import read_rope
from specbuild.builder.checkpoint.source import open_directory, read_config
from specbuild.builder.checkpoint.target_parts import (
    TargetCheckpoint,
    read_eos,
    text_files,
    tie_head,
)
from specbuild.builder.checkpoint.target_tensors import target_tensors
from specbuild.builder.families.deepseek import checkpoint as deepseek
from specbuild.builder.families.gpt_oss import original_layout
from specbuild.runtime.engine_dir.manifest import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

SUPPORTED = {"gpt_oss": ("GptOssForCausalLM",), deepseek.MODEL_TYPE: ("DeepseekV3ForCausalLM",)}
LABEL = "target config.json"
DEFAULT_THETA = 150000.0
LAYER_TYPES = ("sliding_attention", "full_attention")


def read_target(
    path: Path, *, strict: bool, mla: bool = True, dsa: bool | None = None
) -> TargetCheckpoint:
    """Read the headers of the checkpoint at ``path``, in either layout; no weights are loaded.

    Latents that lie beside it take the place of keys and values, unless ``mla`` is false. Indexers
    are used where ``dsa`` asks for them, or the config where it is None.
    Raises SpecbuildError if it is no checkpoint, is of an unsupported kind, or does not hold
    exactly the tensors that its configuration asks for; ``strict`` also refuses unknown fields.
    """
    path = Path(path)
    config = Config(str(path / "config.json"), LABEL, read_config(path))
    original = original_layout.is_original(config.fields)
    if not original:
        _check_model_type(path, config)
    if config.text("model_type") == deepseek.MODEL_TYPE:
        return deepseek.read_deepseek(path, config, strict=strict, mla=mla, dsa=dsa)
    geometry, warnings = (_read_original if original else _read_hf)(path, config, strict=strict)
    _check_geometry(config.where, geometry)
    if not geometry.eos_token_ids:
        warnings += ("target: no EOS token is named; output ends at its length only",)
    tensors = open_directory(path)
    if original:
        tensors = original_layout.to_canonical(
            tensors,
            q_rows=geometry.q_heads * geometry.head_dim,
            kv_rows=geometry.kv_heads * geometry.head_dim,
        )
    if config.boolean("tie_word_embeddings", False):
        tie_head(path, tensors)
    hints = mismatch_hints(geometry, tensors)
    audit(str(path), target_tensors(geometry), tensors, hints)
    files = text_files(_text_roots(path, original))
    warnings += check_fields(config.section("attention"), ATTENTION, strict=strict)
    target = TargetCheckpoint(geometry, tensors, warnings, files)
    if mla:
        target = _with_latents(target, read_latents(path, config, geometry))
    indexers, more = read_indexers(path, config, geometry, asked=dsa)
    target = _with_indexers(target, indexers)
    return dataclasses.replace(target, warnings=(*target.warnings, *more))


def _with_latents(target: TargetCheckpoint, latents: Latents | None) -> TargetCheckpoint:
    if latents is None:
        return target
    return dataclasses.replace(
        target,
        geometry=dataclasses.replace(target.geometry, latent_dims=latents.dims),
        tensors={**target.tensors, **latents.tensors},
        warnings=(*target.warnings, *latents.warnings),
        replaced=latents.replaced,
    )


def _with_indexers(target: TargetCheckpoint, indexers: Indexers | None) -> TargetCheckpoint:
    if indexers is None:
        return target
    return dataclasses.replace(
        target,
        geometry=dataclasses.replace(target.geometry, indexer=indexers.geometry),
        tensors={**target.tensors, **indexers.tensors},
    )


def _check_model_type(path: Path, config: Config) -> None:
    model_type, architectures = config.text("model_type"), config.texts("architectures")
    if model_type in SUPPORTED and (
        not architectures or set(architectures) & set(SUPPORTED[model_type])
    ):
        return
    names: set[str] = set()
    with suppress(SpecbuildError):  # the model is refused anyway; the names only make hints
        names = set(open_directory(path))
    got = f"model_type {model_type!r}"
    if model_type in SUPPORTED:
        got = f"architectures {list(architectures)!r}"
    supported = ", ".join(f"{kind} ({', '.join(a)})" for kind, a in SUPPORTED.items())
    lines = [f"{config.where}: {got} is not supported (supported: {supported})"]
    lines += [f"  hint: {hint}" for hint in wrong_model_hints(config, names)]
    raise SpecbuildError("\n".join(lines))


def _read_hf(path: Path, config: Config, *, strict: bool) -> tuple[TargetGeometry, tuple[str, ...]]:
    warnings = check_fields(config, GPT_OSS, strict=strict)
    expert_format, more = _read_quantization(config, strict=strict)
    layers = config.integer("num_hidden_layers")
    layer_types = _read_layer_types(config, layers)
    sliding = "sliding_attention" in layer_types
    geometry = TargetGeometry(
        model_type="gpt_oss",
        layers=layers,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        q_heads=config.integer("num_attention_heads"),
        kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
        experts=_either(config, "num_local_experts", "num_experts"),
        experts_per_token=_either(config, "num_experts_per_tok", "experts_per_token"),
        expert_inner=config.integer("intermediate_size"),
        expert_format=expert_format,
        layer_types=layer_types,
        sliding_window=config.integer("sliding_window", None if sliding else 0, least=int(sliding)),
        max_positions=config.integer("max_position_embeddings"),
        rms_eps=config.number("rms_norm_eps", 1e-5),
        swiglu_limit=config.number("swiglu_limit", 7.0),
        rope=read_rope(config, default_theta=DEFAULT_THETA, required=True),
        eos_token_ids=read_eos((path,), config),
    )
    return geometry, warnings + more


def _read_original(
    path: Path, config: Config, *, strict: bool
) -> tuple[TargetGeometry, tuple[str, ...]]:
    warnings = check_fields(config, GPT_OSS_ORIGINAL, strict=strict)
    layers = config.integer("num_hidden_layers")
    rope = original_layout.read_rope(config)
    geometry = TargetGeometry(
        model_type="gpt_oss",
        layers=layers,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        q_heads=config.integer("num_attention_heads"),
        kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
        experts=config.integer("num_experts"),
        experts_per_token=config.integer("experts_per_token"),
        expert_inner=config.integer("intermediate_size"),
        expert_format="mxfp4",
        layer_types=_alternating(layers),
        sliding_window=config.integer("sliding_window"),
        max_positions=int(config.integer("initial_context_length") * rope.factor),
        rms_eps=original_layout.RMS_EPS,
        swiglu_limit=config.number("swiglu_limit", 7.0),
        rope=rope,
        eos_token_ids=read_eos(_text_roots(path, original=True), config),
    )
    if not geometry.eos_token_ids and geometry.vocab == original_layout.RELEASE_VOCAB:
        geometry = dataclasses.replace(geometry, eos_token_ids=original_layout.RELEASE_EOS)
        warnings += (f"target: no EOS token is named; the release's {geometry.eos_token_ids} used",)
    return geometry, warnings


def _read_quantization(
    config: Config, *, strict: bool
) -> tuple[Literal["mxfp4", "bf16"], tuple[str, ...]]:
    if config.get("quantization_config") is None:
        return "bf16", ()
    section = config.section("quantization_config")
    if section.get("quant_method") != "mxfp4":
        raise section.wrong("quant_method", "'mxfp4', or no quantization_config")
    return "mxfp4", check_fields(section, MXFP4_QUANTIZATION, strict=strict)


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple(LAYER_TYPES[layer % 2] for layer in range(layers))


def _read_layer_types(config: Config, layers: int) -> tuple[str, ...]:
    if config.get("layer_types") is None:
        return _alternating(layers)
    listed = config.texts("layer_types")
    if len(listed) != layers or not set(listed) <= set(LAYER_TYPES):
        raise config.wrong("layer_types", f"{layers} of {' or '.join(LAYER_TYPES)}")
    return listed


def _either(config: Config, name: str, alias: str) -> int:
    """A number that has two spellings, which must agree where both are given."""
    values: set[int] = {config.integer(n) for n in (name, alias) if config.get(n) is not None}
    if len(values) > 1:
        raise config.wrong(name, f"the value of {alias}, {config.get(alias)!r}")
    return values.pop() if values else config.integer(name)


def _check_geometry(where: str, g: TargetGeometry) -> None:
    wrong = []
    if g.q_heads % g.kv_heads:
        wrong.append(f"{g.q_heads} query heads do not divide among {g.kv_heads} KV heads")
    if g.head_dim % 2:
        wrong.append(f"head_dim {g.head_dim} is odd, rotary embedding needs pairs")
    if g.experts_per_token > g.experts:
        wrong.append(f"{g.experts_per_token} experts per token, but only {g.experts} experts")
    if g.expert_format == "mxfp4" and (g.hidden % 32 or g.expert_inner % 32):
        wrong.append(
            f"MXFP4 needs multiples of 32, got hidden_size {g.hidden} and intermediate_size "
            f"{g.expert_inner}"
        )
    if wrong:
        raise SpecbuildError(f"{where}: {'; '.join(wrong)}")


def _text_roots(path: Path, original: bool) -> tuple[Path, ...]:
    """Where text files lie: the release keeps its original layout in a folder of the other one."""
    return (
        (path, path.resolve().parent) if original and path.resolve().name == "original" else (path,)
    )
