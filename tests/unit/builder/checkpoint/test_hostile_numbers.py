"""Any number in a checkpoint's configuration gives a model or an error in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import edit_config
from checkpoints import write_draft, write_target
from deepseek_checkpoints import add_predictor, write_deepseek
from dflash_drafts import write_dflash
from gguf_files import Stored, write_gguf
from gguf_keys import APART, DEEPSEEK_KEYS, LLAMA_KEYS, LLAMA_KINDS, write_gpt_oss
from gguf_models import deepseek_twin, llama_twin
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from llama_checkpoints import OF_KIND, write_llama
from mimo_checkpoints import write_mimo
from numeric_fields import HOSTILE, Place, numeric_places, written
from p_eagle_drafts import write_p_eagle

from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.source import read_json
from specbuild.builder.families.checkpoints import read_draft, read_own_draft, read_target
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.builder.families.registry import TARGETS
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1,
}  # fmt: skip


# Model types whose fields equal those of another type.
TWINS = {"kimi_k2", "youtu_llm", "qwen3_vl_text"}


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint and how to write it; ``predicts``: it has an MTP layer that drafts."""

    write: Callable[[Path], object]
    draft: bool = False
    predicts: bool = False


def _predicting(path: Path) -> None:
    write_deepseek(path)
    add_predictor(path)


KINDS: dict[str, Kind] = {
    "gpt_oss": Kind(lambda path: write_target(path, layers=2)),
    "gpt_oss, older rope": Kind(
        lambda path: write_target(path, layers=2, rope_spelling="rope_scaling")
    ),
    "gpt_oss, original": Kind(lambda path: write_target(path, layers=2, layout="original")),
    **{
        kind: Kind(partial(write_llama, kind=kind))
        for family in TARGETS.values()
        for kind in family.model_types
        if kind in OF_KIND and kind not in TWINS
    },
    "qwen3, yarn": Kind(lambda path: write_llama(path, "qwen3", rope_parameters=YARN)),
    "mimo": Kind(write_mimo),
    "deepseek_v3": Kind(_predicting, predicts=True),
    "deepseek_v2": Kind(lambda path: write_deepseek(path, kind="deepseek_v2")),
    "glm4_moe_lite": Kind(lambda path: write_deepseek(path, kind="glm4_moe_lite")),
    "youtu": Kind(lambda path: write_deepseek(path, kind="youtu")),
    "eagle3": Kind(lambda path: write_draft(path, rope_scaling=YARN), draft=True),
    "speculators": Kind(
        lambda path: write_draft(path, architecture="Eagle3Speculator"), draft=True
    ),
    "p_eagle": Kind(write_p_eagle, draft=True),
    "dflash": Kind(write_dflash, draft=True),
}


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk: for each file, the paths of its numbers, and of optional ones."""

    path: Path
    places: list[tuple[str, Place]]


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, geometry: TargetGeometry
) -> dict[str, Written]:
    by_key = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        path = tmp_path_factory.mktemp(f"checkpoint{number}")
        kind.write(path)
        places = places_read(kind, path, geometry)
        for file in path.glob("*config.json"):
            if file.name != "tokenizer_config.json":
                places |= {(file.name, p) for p in numeric_places(json.loads(file.read_text()))}
        by_key[name] = Written(path, sorted(places, key=str))
    return by_key


def places_read(kind: Kind, path: Path, target: TargetGeometry) -> set[tuple[str, Place]]:
    """Return every field that the reader looks up, for each file, including absent fields."""
    places = set()
    get = Config.get

    def recorded(config: Config, name: str) -> Any:
        file, *sections = config.where.split(": ")
        if file.endswith(".json"):
            places.add((Path(file).name, (*sections, name)))
        return get(config, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "get", recorded)
        read(kind, path, target, strict=False)
    return places


def require_finite(rope: Rope, width: int) -> None:
    """Assert that the RoPE tables of the read values are finite."""
    for table in rope_tables(rope, width, 4):
        assert table.isfinite().all(), rope


@pytest.mark.parametrize("kind", KINDS)
@examples(80)
@given(data=st.data(), literal=st.sampled_from(HOSTILE), strict=st.booleans())
def test_any_number_gives_a_model_or_an_error(
    checkpoints: dict[str, Written],
    geometry: TargetGeometry,
    kind: str,
    data: st.DataObject,
    literal: str,
    strict: bool,
) -> None:
    checkpoint = checkpoints[kind]
    name, place = data.draw(st.sampled_from(checkpoint.places))
    file = checkpoint.path / name
    before = written(file, place, literal)
    try:
        read(KINDS[kind], checkpoint.path, geometry, strict=strict)
    except SpecbuildError as error:
        assert str(checkpoint.path) in str(error)
    finally:
        file.write_bytes(before)


def read(kind: Kind, path: Path, target: TargetGeometry, *, strict: bool) -> None:
    """Read the checkpoint, and its draft if there is one; compute with the read values."""
    if kind.draft:
        draft = read_draft(path, target, strict=strict).geometry
        require_finite(draft.rope, draft.head_dim)
        return
    result = read_target(path, strict=strict).geometry
    for rope in (result.rope, result.window_rope or result.rope):
        require_finite(rope, result.head_dim if result.mla is None else result.mla.rope_dim)
    if kind.predicts:
        read_own_draft(path, result, strict=strict)


@pytest.mark.parametrize("literal", ["1e400", "NaN", "-Infinity"])
@pytest.mark.parametrize(
    ("place", "where"),
    [
        (("rope_parameters", "factor"), "rope_parameters.factor"),
        (("num_hidden_layers",), "num_hidden_layers"),
        (("unknown", "list", 1), "unknown.list[1]"),
    ],
)
def test_the_error_names_a_number_that_is_not_finite(
    tmp_path: Path, place: Place, where: str, literal: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"rope_parameters": {}, "unknown": {"list": [1, 2]}}')
    written(file, place, literal)
    with pytest.raises(SpecbuildError) as refused:
        read_json(file)
    assert str(refused.value) == (
        f"{file}: {where}: is not a finite number; correct the value in the file"
    )


def test_rejects_too_many_experts(tmp_path: Path) -> None:
    """Each size alone is allowed, but their product is millions of expected tensors."""
    write_llama(tmp_path, "qwen3_moe")
    edit_config(tmp_path, num_hidden_layers=4096, num_experts=4096, num_local_experts=4096)
    with pytest.raises(SpecbuildError, match="4096 layers of 4096 experts, expected up to 262144"):
        read_target(tmp_path, strict=False)


def test_every_family_is_covered() -> None:
    kinds = {model_type for family in TARGETS.values() for model_type in family.model_types}
    assert kinds - set(KINDS) <= TWINS, "write one, or name its twin here"


GgufModel = tuple[str, dict[str, Any], dict[str, Stored]]
GGUF_VALUES = (
    float("inf"), float("nan"), 3e38, -1.0, 1e-40, 0, 4096, 2**31, 2**32 - 1, True, "x", [3, 4],
    [0, 0, 0],
)  # fmt: skip


@pytest.fixture(scope="module")
def gguf_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufModel]:
    folder = tmp_path_factory.mktemp("gguf")
    _, keys, tensors = write_gpt_oss(folder / "gpt-oss")
    written = {"gpt-oss": ("gpt-oss", keys, tensors)}
    write_deepseek(folder / "deepseek")
    config = json.loads((folder / "deepseek" / "config.json").read_text())
    twin = deepseek_twin(folder / "deepseek", config, apart=True)
    written["deepseek2"] = ("deepseek2", DEEPSEEK_KEYS | APART, twin)
    for kind, (architecture, own) in LLAMA_KINDS.items():
        changes = {"rope_parameters": {"rope_type": "default"}} if kind == "llama" else {}
        write_llama(folder / kind, kind, **changes)
        config = json.loads((folder / kind / "config.json").read_text())
        written[kind] = (architecture, LLAMA_KEYS | own, llama_twin(folder / kind, config))
    return written


@pytest.mark.parametrize("kind", ["gpt-oss", "deepseek2", *LLAMA_KINDS])
@examples(60)
@given(data=st.data(), value=st.sampled_from(GGUF_VALUES))
def test_any_number_in_gguf_gives_a_model_or_an_error(
    gguf_models: dict[str, GgufModel],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    data: st.DataObject,
    value: Any,
) -> None:
    architecture, keys, tensors = gguf_models[kind]
    further = {".rope.scaling.factor", ".rope.scale_linear", ".nextn_predict_layers",
               ".expert_count", "tokenizer.ggml.eos_token_id"}  # fmt: skip
    names = sorted(further | {name for name in keys if not isinstance(keys[name], list)})
    name = data.draw(st.sampled_from(names))
    file = tmp_path_factory.mktemp("hostile") / "model.gguf"
    write_gguf(file, architecture, keys | {name: value}, tensors)
    try:
        result = read_target(file, strict=False).geometry
        require_finite(result.rope, result.head_dim if result.mla is None else result.mla.rope_dim)
    except SpecbuildError as error:
        assert str(file) in str(error)
    finally:
        file.unlink()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_key_heads_that_divide_no_value_heads_are_refused_with_the_file(
    gguf_models: dict[str, GgufModel], tmp_path: Path, kind: str
) -> None:
    architecture, keys, tensors = gguf_models[kind]
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture, keys | {".ssm.group_count": 4096}, tensors)
    with pytest.raises(SpecbuildError, match=r"model\.gguf.*ssm\.group_count"):
        read_target(file, strict=False)
