"""Rotary embedding from a configuration, in both of its spellings, with all defaults applied."""

from __future__ import annotations

import math
from collections.abc import Callable

from specbuild.builder.checkpoint.config_fields import ROPE, FieldTable, check_fields
from specbuild.builder.checkpoint.config_json import MAX_SIZE, Config
from specbuild.runtime.engine_dir.geometry import Rope
from specbuild.runtime.engine_dir.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)
from specbuild.runtime.errors import SpecbuildError

NESTED = ("rope_parameters", "rope_scaling")
# The sections of ``rope_parameters`` if RoPE depends on the type of layer.
LAYER_SECTIONS = ("full_attention", "sliding_attention")
ORIGINAL = "original_max_position_embeddings"
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
_SPELLINGS = {"su": "longrope", "deepseek_yarn": "yarn"}
_SHARE = "partial_rotary_factor"
_TITLES = {
    "dynamic": "dynamic NTK",
    "linear": "linear",
    "llama3": "Llama 3's",
    "longrope": "LongRoPE",
    "proportional": "proportional",
    "yarn": "YaRN",
}


def read_rope(
    config: Config,
    *,
    default_theta: float,
    required: bool = False,
    also: frozenset[str] = frozenset(),
) -> Rope:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before).

    ``also`` are keys of either that the family reads itself.

    Raises SpecbuildError for a kind that is not implemented, for a key that is not implemented,
    where both spellings are present and differ, and where one is ``required`` and both are absent.
    """
    present = [name for name in NESTED if config.get(name) is not None]
    if required and not present:
        raise SpecbuildError(
            f"{config.where}: neither {NESTED[0]} nor {NESTED[1]} is there, without which nobody "
            'knows how positions are scaled; add one, {"rope_type": "default"} if they are not'
        )
    sections = [config.section(name) for name in present or [NESTED[0]]]
    readings = {_read(config, section, default_theta, also) for section in sections}
    if len(readings) > 1:
        raise SpecbuildError(
            f"{config.where}: rope_parameters and rope_scaling differ; keep the right one"
        )
    return readings.pop()


def read_layer_ropes(
    config: Config, *, default_theta: float, window_theta: float = 0.0
) -> tuple[Rope, Rope]:
    """Return those of layers without and with a window.

    ``rope_parameters`` may have a section for each. Otherwise layers with a window have
    ``window_theta`` (0: the theta of the others) and no scaling.
    """
    by_layer = config.section(NESTED[0])
    if by_layer.get(LAYER_SECTIONS[0]) is None:
        full = read_rope(config, default_theta=default_theta)
        return full, Rope(window_theta or full.theta)
    if config.get(NESTED[1]) is not None:
        raise config.wrong(NESTED[1], f"none, {NESTED[0]} has a section for each type of layer")
    check_fields(by_layer, FieldTable(frozenset(LAYER_SECTIONS), {}), strict=True, way_out="")
    thetas = (default_theta, window_theta or default_theta)
    full, window = (
        _read(config, by_layer.section(name), theta, frozenset())
        for name, theta in zip(LAYER_SECTIONS, thetas, strict=True)
    )
    return full, window


def rotated_width(config: Config, head_dim: int, default: float = 1.0) -> int | None:
    """Return the number of values of a head with RoPE, by ``partial_rotary_factor``; None: all.

    Raises SpecbuildError for a factor that yields an odd number, zero, or more than a head has.
    """
    name = _SHARE
    places = [*[config.section(nested) for nested in NESTED], config]
    place = next((place for place in places if place.get(name) is not None), config)
    factor = place.number(name, default)
    width = int(head_dim * factor)
    if width % 2 or not 0 < width <= head_dim:
        raise place.wrong(name, f"a share of head_dim {head_dim} that is an even number of values")
    return None if width == head_dim else width


def read_positions(config: Config, rope: Rope) -> int:
    """Return the number of positions that a model supports.

    Qwen's recipe for long contexts adds YaRN to the configuration and leaves
    ``max_position_embeddings`` unchanged: it then supports the original context times the factor.
    """
    named = config.integer("max_position_embeddings")
    if isinstance(rope.scaling, DynamicScaling):
        reached = rope.scaling.original_max_positions * rope.scaling.factor
        return min(max(named, int(reached)), MAX_SIZE)
    places = (config, *(config.section(name) for name in NESTED))
    names_original = any(place.get(ORIGINAL) is not None for place in places)
    if not names_original or not isinstance(rope.scaling, YarnScaling):
        return named
    reached = rope.scaling.original_max_positions * rope.scaling.factor
    return min(max(named, int(reached)), MAX_SIZE)


def read_optional_positions(config: Config, rope: Rope) -> int | None:
    """Return the same, or None if a draft's configuration names no positions."""
    absent = config.get("max_position_embeddings") is None
    return None if absent else read_positions(config, rope)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of cos and sin if a configuration has no explicit value."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_score_factor(config: Config, rope: Rope) -> float:
    """Return DeepSeek's factor of scores with YaRN: ``mscale²``."""
    if not isinstance(rope.scaling, YarnScaling):
        return 1.0
    nested = next(config.section(name) for name in NESTED if config.get(name) is not None)
    mscale = _mscale(nested, "mscale_all_dim")
    return 1.0 if mscale is None else yarn_attention_factor(rope.scaling.factor, mscale) ** 2


def describe(rope: Rope) -> str:
    """Return one phrase for reports."""
    scaling = rope.scaling
    if scaling is None:
        return f"theta {rope.theta:g} without scaling"
    name = _TITLES[scaling.kind]
    over = ""
    if not isinstance(scaling, LinearScaling | ProportionalScaling):
        over = f" over {scaling.original_max_positions}"
    if isinstance(scaling, LongRopeScaling):
        which = "short" if scaling.factors == scaling.short_factors else "long"
        return f"theta {rope.theta:g} with {name}'s {which} factors{over}"
    return f"theta {rope.theta:g} with {name} × {scaling.factor:g}{over}"


def _read(config: Config, nested: Config, default_theta: float, also: frozenset[str]) -> Rope:
    kind = nested.text("rope_type") or nested.text("type") or "default"
    kind = _SPELLINGS.get(kind, kind)
    if kind not in KINDS:
        supported = ", ".join(map(repr, KINDS))
        raise SpecbuildError(
            f"{nested.where}: rope_type {kind!r} is not implemented (supported: {supported})"
        )
    also = also | {_SHARE} if kind == "proportional" else also
    only = {name: values for name, values in ROPE.only.items() if name not in also}
    check_fields(nested, FieldTable(ROPE.read | also, only), strict=True, way_out="")
    theta = nested.number("rope_theta", config.number("rope_theta", default_theta))
    if theta <= 1:
        place = config if nested.get("rope_theta") is None else nested
        raise place.wrong("rope_theta", "a number above 1, the base of the frequencies")
    return Rope(theta, _scaling(config, nested, kind))


def _scaling(config: Config, nested: Config, kind: str) -> RopeScaling | None:
    return None if kind == "default" else _SCALINGS[kind](config, nested)


def _linear(_config: Config, nested: Config) -> LinearScaling:
    return LinearScaling(factor=nested.number("factor"))


def _dynamic(config: Config, nested: Config) -> DynamicScaling:
    original = _original(config, nested)
    return DynamicScaling(factor=nested.number("factor"), original_max_positions=original)


def _proportional(_config: Config, nested: Config) -> ProportionalScaling:
    share = nested.number(_SHARE, 1.0)
    if share > 1:
        raise nested.wrong(_SHARE, "at most 1, the share of the frequencies that turn")
    return ProportionalScaling(factor=nested.number("factor", 1.0), share=share)


def _yarn(config: Config, nested: Config) -> YarnScaling:
    factor = nested.number("factor")
    return YarnScaling(
        factor=factor,
        original_max_positions=_original(config, nested),
        beta_fast=nested.number("beta_fast", 32.0),
        beta_slow=nested.number("beta_slow", 1.0),
        truncate=nested.boolean("truncate", True),
        attention_factor=_attention_factor(nested, factor),
    )


def _original(config: Config, nested: Config) -> int:
    return (
        nested.optional_integer(ORIGINAL)
        or config.optional_integer(ORIGINAL)
        or config.integer("max_position_embeddings")
    )


def _longrope(config: Config, nested: Config) -> LongRopeScaling:
    """Read Phi-3's: without an explicit factor, attention's follows from the positions."""
    original = _original(config, nested)
    short, long = (nested.numbers(f"{name}_factor") for name in ("short", "long"))
    if len(short) != len(long) or not short:
        raise nested.wrong("long_factor", f"as many numbers as short_factor has, {len(short)}")
    factor = nested.number("factor", config.integer("max_position_embeddings") / original)
    by_default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        original_max_positions=original,
        short_factors=short,
        long_factors=long,
        attention_factor=nested.number("attention_factor", by_default),
    )


def _llama3(config: Config, nested: Config) -> Llama3Scaling:
    factor, original = nested.number("factor"), _original(config, nested)
    low, high = nested.number("low_freq_factor"), nested.number("high_freq_factor")
    if low >= high:
        raise nested.wrong("high_freq_factor", f"more than low_freq_factor, {low:g}")
    return Llama3Scaling(
        factor=factor,
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _attention_factor(nested: Config, factor: float) -> float:
    if nested.get("attention_factor") is not None:
        return nested.number("attention_factor")
    mscale, all_dim = _mscale(nested, "mscale"), _mscale(nested, "mscale_all_dim")
    if mscale is not None and all_dim is not None:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    return yarn_attention_factor(factor)


def _mscale(nested: Config, name: str) -> float | None:
    """Return one of DeepSeek's two factors; None if it is absent or 0, which is equivalent."""
    return None if nested.get(name) in (None, 0) else nested.number(name)


_SCALINGS: dict[str, Callable[[Config, Config], RopeScaling]] = {
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
