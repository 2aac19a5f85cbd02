"""Keys, kinds and values of later features, as older and newer runtimes read them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from engine_directory import write_manifest
from family_geometries import LLAMA_31_8B
from toy_model import toy_manifest

from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir import files
from specbuild.runtime.engine_dir.drafters.record import DrafterRecord
from specbuild.runtime.engine_dir.features import (
    known_features,
    of_feature,
    one_of,
    stored_json,
    used_features,
)
from specbuild.runtime.engine_dir.feed_forward import (
    WEIGHT_STORAGES,
    Activation,
    DenseFeedForward,
    Swiglu,
)
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.strict_json import field_types, open_union
from specbuild.runtime.errors import EngineFileError

VERSION = importlib.metadata.version("specbuild")
KEYS = Path(__file__).with_name("format_version_3.json")
STORAGES = {**WEIGHT_STORAGES, "q4_k": "gguf"}


@dataclass(frozen=True, kw_only=True)
class PackedFeedForward:
    """A member that a later runtime adds to the union."""

    FEATURE: ClassVar[str] = "packed"

    kind: Literal["packed"] = "packed"
    inner: int
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class NextTarget(TargetGeometry):
    feed_forwards: tuple[DenseFeedForward | PackedFeedForward, ...]  # type: ignore[assignment]
    embedding: str = field(
        default="bf16", metadata=of_feature("stored_embedding") | one_of(STORAGES)
    )


@dataclass(frozen=True)
class NextManifest(Manifest):
    target: NextTarget
    mood: str = field(default="calm", metadata=of_feature("moods"))


def next_manifest(target: dict[str, Any] | None = None, **changes: Any) -> NextManifest:
    """Return the manifest of a later runtime for an engine with a dense target."""
    plain = {f.name: getattr(LLAMA_31_8B, f.name) for f in dataclasses.fields(LLAMA_31_8B)}
    toy = toy_manifest()
    known = {f.name: getattr(toy, f.name) for f in dataclasses.fields(toy)}
    return NextManifest(**{**known, "target": NextTarget(**(plain | (target or {}))), **changes})


def packed() -> tuple[PackedFeedForward]:
    return (PackedFeedForward(inner=4, activation=Swiglu()),)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], NextManifest]:
    """Read as a runtime with more features does."""

    def read(path: Path) -> NextManifest:
        with monkeypatch.context() as patched:
            patched.setattr(files, "Manifest", NextManifest)
            found: Any = read_manifest(path)
        return typing.cast(NextManifest, found)

    return read


def test_features_of_version_3_are_listed() -> None:
    assert known_features(Manifest) == {
        "adjusted_steps",
        "attention_scale",
        "coded_weights",
        "dflash",
        "dflash_anchor",
        "draft_layers",
        "draft_mla",
        "draft_models",
        "draft_parts",
        "drafted_processors",
        "dsa",
        "gated_delta",
        "geglu",
        "gemma4_assistant",
        "generation_defaults",
        "latents",
        "linear_rope",
        "mtp",
        "mtp_keys_values",
        "multipliers",
        "norm_places",
        "output_gate",
        "p_eagle",
        "quantized_products",
        "ragged_steps",
        "query_growth",
        "shared_gate",
        "specpv",
        "suffix",
        "tensorrt",
        "unrotated_layers",
        "expert_scale",
        "keys_as_values",
        "layer_inputs",
        "layer_scale",
        "logits_cap",
        "normed_apart",
        "dynamic_rope",
        "longrope",
        "proportional_rope",
        "shared_caches",
        "tensor_parallel",
        "value_norm",
        "window_heads",
        "window_rope",
    }
    more = {"moods", "stored_embedding", "gguf", "packed"}
    assert known_features(NextManifest) == known_features(Manifest) | more


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"mood": "elated"}, "feature 'moods'"),
        ({"target": {"embedding": "fp8"}}, "feature 'stored_embedding'"),
        ({"target": {"embedding": "q4_k"}}, "features 'gguf', 'stored_embedding'"),
        ({"target": {"feed_forwards": packed()}}, "feature 'packed'"),
    ],
)
def test_an_older_runtime_names_the_feature_that_it_has_not(
    tmp_path: Path,
    later: Callable[[Path], NextManifest],
    changes: dict[str, Any],
    names: str,
) -> None:
    written = next_manifest(**changes)
    write_manifest(tmp_path, written)
    assert later(tmp_path) == replace(written, features=used_features(written))
    with pytest.raises(EngineFileError) as refused:
        read_manifest(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: engine needs {names}, which this specbuild ({VERSION}) does not have; "
        "update it"
    )


def test_an_older_runtime_loads_engines_without_the_feature(tmp_path: Path) -> None:
    write_manifest(tmp_path, next_manifest())
    found = read_manifest(tmp_path)
    assert found.features == () and found.target == LLAMA_31_8B


def test_a_key_that_an_older_engine_lacks_has_its_default(
    tmp_path: Path, later: Callable[[Path], NextManifest]
) -> None:
    write_manifest(tmp_path, replace(toy_manifest(), target=LLAMA_31_8B))
    assert later(tmp_path).mood == "calm" and later(tmp_path).target.embedding == "bf16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(mood="elated"), "unknown keys mood"),
        (lambda d: d["target"].update(embedding="fp8"), "unknown keys embedding"),
        (lambda d: d.update(features=["specpv"], specpv=None), ""),
        (lambda d: d.update(features=[], replaced={"a": "b"}), "'latents' is used, but not listed"),
        (lambda d: d.update(features="specpv"), "expected a list of names"),
        (lambda d: d.update(features=[["specpv"]]), "expected a list of names"),
        (lambda d: d.update(features=["a\nb"]), r"engine needs feature 'a\\nb'"),
        (lambda d: d["cache_groups"][0].update(dtype="int3"), "dtype: got 'int3', expected one of"),
        (
            lambda d: d["target"]["feed_forwards"][0].update(storage="q4_k"),
            "storage: got 'q4_k', expected one of 'fp32', 'bf16', 'fp8', 'mxfp4'",
        ),
        (
            lambda d: d["target"]["feed_forwards"][0].update(kind="packed"),
            "kind: got 'packed', expected one of 'dense', 'moe', 'both'",
        ),
        (lambda d: d["target"]["feed_forwards"][0].update(kind=["moe"]), "expected one of 'dense'"),
        (lambda d: d["target"]["feed_forwards"][0].pop("kind"), "key 'kind' is missing"),
        (lambda d: d["target"].update(feed_forwards=[3]), "got 3, expected an object"),
        (lambda d: d["drafters"][0].update(kind="eagle9"), "got 'eagle9', expected one of"),
        (lambda d: d["target"]["layer_types"].append("linear"), "got 'linear', expected one of"),
    ],
)
def test_rejects_keys_of_unlisted_features(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    described = stored_json(toy_manifest())
    change(described)
    write_manifest(tmp_path, described)
    if not message:
        read_manifest(tmp_path)
        return
    with pytest.raises(EngineFileError, match=message) as refused:
        read_manifest(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("found", [1, 2])
def test_rejects_older_versions_with_the_remedy(tmp_path: Path, found: int) -> None:
    write_manifest(tmp_path, {**stored_json(toy_manifest()), "format_version": found})
    with pytest.raises(EngineFileError) as refused:
        read_manifest(tmp_path)
    assert str(refused.value).startswith(
        f"{tmp_path / 'manifest.json'} is of format version {found} (specbuild "
    )
    assert f"reads {FORMAT_VERSION}; build the engine again: specbuild build " in str(refused.value)


def test_keys_without_a_feature_belong_to_version_3() -> None:
    """A later key has a feature and a default. Others need a new ``FORMAT_VERSION``."""
    recorded = json.loads(KEYS.read_text(encoding="utf-8"))
    assert recorded["format_version"] == FORMAT_VERSION
    assert recorded["keys"] == {
        kind.__name__: [f.name for f in dataclasses.fields(kind) if "feature" not in f.metadata]
        for kind in sorted(records(Manifest), key=lambda kind: kind.__name__)
        if not hasattr(kind, "FEATURE") and not (issubclass(kind, DrafterRecord) and not kind.kind)
    }


def test_a_key_with_a_feature_has_a_default() -> None:
    for kind in records(Manifest):
        for each in dataclasses.fields(kind):
            if "feature" in each.metadata:
                defaults = {each.default, each.default_factory}
                assert defaults != {dataclasses.MISSING}, f"{kind.__name__}.{each.name}"


def test_the_documentation_lists_every_feature() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engine-format.md").read_text(encoding="utf-8")
    table = page.partition("| feature | keys |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == known_features(Manifest)


def records(kind: Any) -> set[Any]:
    """Return every dataclass that a manifest may contain."""
    found: set[Any] = set()

    def visit(one: Any) -> Iterator[Any]:
        yield from typing.get_args(one)
        yield from (open_union(one) or {}).values()
        if dataclasses.is_dataclass(one) and one not in found:
            found.add(one)
            yield from field_types(one).values()

    pending = [kind]
    while pending:
        pending += visit(pending.pop())
    return found
