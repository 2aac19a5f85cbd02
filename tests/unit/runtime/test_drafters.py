"""Drafters by name: those an engine lists, those a run may request, and their capabilities."""

from __future__ import annotations

import pytest
from toy_engine import run, toy_engine

from specbuild.builder.families.registry import DRAFTS
from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.draft.registry import HOST_KINDS, MODEL_KINDS, NAMES
from specbuild.runtime.engine_dir.drafters.registry import RECORDS
from specbuild.runtime.engine_dir.manifest import ROLES, DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams

PARAMS = GenerateParams(max_new_tokens=12)
KINDS = {**MODEL_KINDS, **HOST_KINDS}


def test_manifest_runtime_and_builder_know_the_same_drafters() -> None:
    families = {name.replace("_", "-"): family for name, family in DRAFTS.items()}
    assert RECORDS.keys() == KINDS.keys()
    assert {n for n, kind in KINDS.items() if kind.capabilities.needs_weights} == families.keys()
    for name, kind in KINDS.items():
        assert kind.name == kind.capabilities.name == name
        assert set(RECORDS[name].ROLES) <= set(ROLES)
        assert (kind.capabilities.passes == "none") == (not kind.capabilities.needs_weights)
    assert ("auto", *KINDS, "none") == NAMES


@pytest.mark.parametrize("name", ["auto", "eagle3"])
def test_a_drafter_that_the_engine_has_drafts(name: str) -> None:
    engine, shape = toy_engine(), DraftShape(1, 2, 2)
    plain = run(engine, [[3, 1]], PARAMS, speculation=None)
    before = len(engine.executor.launches)
    drafted = run(engine, [[3, 1]], PARAMS, speculation=shape, drafter=name)
    assert drafted.ids == plain.ids
    assert any(role == "draft" for role, _ in engine.executor.launches[before:])


def test_none_is_decoding_without_a_draft() -> None:
    engine = toy_engine()
    assert DraftSetting(drafter="none").same_as(DraftSetting(None))
    plain, none = (run(engine, [[3, 1]], PARAMS, **how) for how in
                   (dict(speculation=None), dict(drafter="none")))  # fmt: skip
    assert none.ids == plain.ids
    assert not any(role == "draft" for role, _ in engine.executor.launches)
    with pytest.raises(RequestError, match="omit one"):
        DraftSetting(DraftShape(1, 2, 2), "none")


def test_different_drafters_do_not_share_a_loop() -> None:
    assert not DraftSetting(drafter="auto").same_as(DraftSetting(drafter="eagle3"))
    assert DraftSetting(drafter="eagle3").same_as(DraftSetting(drafter="eagle3"))


@pytest.mark.parametrize("drafted", [True, False])
def test_rejects_a_drafter_that_the_engine_lacks(drafted: bool) -> None:
    has = "the engine has eagle3; use one of auto, eagle3, none"
    wanted = has if drafted else "the engine has no drafter; use one of auto, none"
    with pytest.raises(RequestError, match=f"drafter 'mtp': {wanted}"):
        toy_engine(drafted=drafted).generate([], drafter="mtp")
