"""The required and the forbidden parts of the manifest of an engine with a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from toy_model import toy_manifest

from specbuild.runtime.engine_dir.manifest import Manifest, ShapeProfile, SizeRange, StoredFile
from specbuild.runtime.engine_dir.manifest_check import check_manifest
from specbuild.runtime.engine_dir.plan import PLAN_FILE
from specbuild.runtime.errors import EngineFileError

FILE = StoredFile(bytes=3, xxh3_128="0" * 32)


def planned() -> Manifest:
    """Return a toy engine with a plan instead of graphs."""
    toy = toy_manifest(drafted=False, max_seq_len=48, max_batch_size=1)
    return replace(
        toy, backend="cuda", device="sm_90a", roles={}, tensors={}, files={PLAN_FILE: FILE}
    )


def test_an_engine_with_a_plan_needs_no_graphs() -> None:
    check_manifest(planned())


def test_the_plan_must_be_there() -> None:
    with pytest.raises(EngineFileError, match=r"plan\.json is not listed"):
        check_manifest(replace(planned(), files={"other": FILE}))


def test_rejects_graphs_in_addition_to_a_plan() -> None:
    graphs = toy_manifest(drafted=False, max_seq_len=48, max_batch_size=1).roles
    with pytest.raises(EngineFileError, match=r"a cuda engine has no graphs, .*target"):
        check_manifest(replace(planned(), roles=graphs))


def test_an_engine_of_graphs_needs_all_of_them() -> None:
    with pytest.raises(EngineFileError, match="roles: missing"):
        check_manifest(replace(planned(), backend="cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": 1}, "pages is 1"),
        ({"latent_widths": (2,)}, "latent_widths are"),
    ],
)
def test_rejects_invalid_cache_groups(changes: dict[str, Any], message: str) -> None:
    group = replace(planned().cache_groups[0], **changes)
    with pytest.raises(EngineFileError, match=message):
        check_manifest(replace(planned(), cache_groups=(group,)))


def test_rejects_a_negative_size() -> None:
    with pytest.raises(EngineFileError, match="-1 bytes"):
        check_manifest(replace(planned(), files={PLAN_FILE: replace(FILE, bytes=-1)}))


@pytest.mark.parametrize(
    ("sizes", "rises"),
    [((1, 4, 8), True), ((0, 0, 0), True), ((8, 4, 8), False), ((1, 9, 8), False),
     ((-1, 4, 8), False), ((1, 4, 1 << 60), False)],
)  # fmt: skip
def test_rejects_profiles_that_are_not_increasing(sizes: tuple[int, int, int], rises: bool) -> None:
    toy = toy_manifest(drafted=False, max_seq_len=48, max_batch_size=1)
    [name, *_] = toy.roles
    profile = ShapeProfile("usual", {"T": SizeRange(*sizes)})
    roles = {**toy.roles, name: replace(toy.roles[name], profiles=(profile,))}
    changed = replace(toy, roles=roles, features=("tensorrt",))
    if rises:
        check_manifest(changed)
        return
    with pytest.raises(EngineFileError, match=f"role {name}: profile usual gives axis T .* rise"):
        check_manifest(changed)
