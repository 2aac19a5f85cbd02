"""Any contents of ``config.json`` give a checkpoint or an error in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import write_json
from checkpoints import write_draft, write_target
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.builder.checkpoint.config_fields import ROPE
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.eagle3.config_fields import DRAFT_DECODER, DRAFT_TOP, EAGLE
from specbuild.builder.families.gpt_oss.config_fields import GPT_OSS, GPT_OSS_ORIGINAL
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.floats(allow_nan=True),
    st.sampled_from(["", "x", "yarn", "default", "mxfp4", "sliding_attention", "gpt_oss", "llama"]),
)
KEYS = sorted(
    {
        name
        for table in (GPT_OSS, GPT_OSS_ORIGINAL, DRAFT_TOP, DRAFT_DECODER, EAGLE, ROPE)
        for name in (*table.read, *table.only)
    }
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)
CHANGES = st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_target(folder / "hf", layers=2)
    write_target(folder / "openai", layers=2, layout="original")
    write_draft(folder / "draft")
    write_draft(folder / "speculators", architecture="Eagle3Speculator")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["hf", "openai", "draft", "speculators"])
@examples(150)
@given(change=st.tuples(CHANGES, st.booleans(), st.booleans()))
def test_any_config_gives_a_checkpoint_or_an_error(
    paths: dict[str, Path],
    geometry: TargetGeometry,
    kind: str,
    change: tuple[dict[str, Any], bool, bool],
) -> None:
    changes, nested, strict = change
    file = paths[kind] / "config.json"
    original = file.read_text()
    config = json.loads(original)
    inner = config.get("transformer_layer_config") if nested else None
    (inner if inner is not None else config).update(changes)
    write_json(file, config)
    try:
        if kind in ("hf", "openai"):
            read_target(paths[kind], strict=strict)
        else:
            read_draft(paths[kind], geometry, strict=strict)
    except SpecbuildError as error:
        assert len(str(error)) > 20
    finally:
        file.write_text(original)
