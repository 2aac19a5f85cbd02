"""P-EAGLE drafts in every config format, and rejected drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors, remove_fields
from p_eagle_drafts import MASK_TOKEN, PlainPEagle, write_p_eagle

from specbuild.builder.families.checkpoints import read_draft
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError


@pytest.mark.parametrize("spelling", ["pard_token", "ptd_token_id"])
@pytest.mark.parametrize("norms", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_fields_of_a_config(
    tmp_path: Path, geometry: TargetGeometry, like_target: dict, spelling: str, norms: dict
) -> None:
    written = write_p_eagle(tmp_path, spelling=spelling, layers=4, **like_target, **norms)
    draft = read_draft(tmp_path, geometry, strict=True)
    assert isinstance(draft.geometry, PEagleGeometry) and draft.warnings == ()
    assert (draft.geometry.mask_token, draft.geometry.layers) == (MASK_TOKEN, 4)
    held = {name for name in written if name not in ("t2d", "mask_hidden")}
    assert set(draft.tensors) == held | {"mask_state", "mask_hidden"}
    assert draft.tensors["mask_hidden"].load().shape == (192,)
    plain = PlainPEagle(written, torch.zeros(1, 64))
    state = plain.fused(written["mask_hidden"].float().reshape(1, -1))
    torch.testing.assert_close(draft.tensors["mask_state"].load(), state)


@pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 1, 192)])
def test_mask_hidden_may_have_leading_axes(
    tmp_path: Path, geometry: TargetGeometry, shape: tuple[int, ...]
) -> None:
    write_p_eagle(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update(mask_hidden=t["mask_hidden"].reshape(shape)))
    assert read_draft(tmp_path, geometry, strict=True).tensors["mask_state"].shape == (1, 64)


def test_speculators_config(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_p_eagle(tmp_path, architecture="Eagle3Speculator", prefix="layers.0", layers=2)
    remove_fields(tmp_path, "pard_token")
    edit_config(
        tmp_path, architectures=["PEagleDraftModel"], speculators_model_type="peagle",
        mask_token_id=7,
    )  # fmt: skip
    draft = read_draft(tmp_path, geometry, strict=True)
    assert isinstance(draft.geometry, PEagleGeometry) and draft.geometry.mask_token == 7


def test_without_a_mask_token_it_is_eagle3(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_p_eagle(tmp_path)
    remove_fields(tmp_path, "pard_token")
    with pytest.raises(SpecbuildError, match=r"left over.*: mask_hidden"):
        read_draft(tmp_path, geometry, strict=True)
    edit_tensors(tmp_path, lambda t: t.pop("mask_hidden"))
    result = read_draft(tmp_path, geometry, strict=True).geometry
    assert type(result) is Eagle3Geometry


REFUSED = {
    "two tokens": ({"ptd_token_id": 6}, "ptd_token_id: got 6, expected pard_token's 5"),
    "beyond the vocabulary": ({"pard_token": 256}, "below the target's vocabulary of 256"),
    "no number": ({"pard_token": "x"}, "a whole number of 0 or more"),
    "unknown field": ({"drafts_backwards": True}, "unknown fields drafts_backwards"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rejects_invalid_configs(tmp_path: Path, geometry: TargetGeometry, case: str) -> None:
    changes, message = REFUSED[case]
    write_p_eagle(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(SpecbuildError, match=message):
        read_draft(tmp_path, geometry, strict=True)


def test_rejects_invalid_tensors(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_p_eagle(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update(mask_hidden=t["mask_hidden"][..., :191]))
    with pytest.raises(SpecbuildError, match=r"mask_hidden.*got \[1, 1, 191\]"):
        read_draft(tmp_path, geometry, strict=True)
    edit_tensors(tmp_path, lambda t: t.pop("mask_hidden"))
    with pytest.raises(SpecbuildError, match="has no mask_hidden"):
        read_draft(tmp_path, geometry, strict=True)
    write_p_eagle(tmp_path, architecture="Eagle3Speculator")
    remove_fields(tmp_path, "pard_token")
    edit_config(tmp_path, speculators_model_type="peagle")
    with pytest.raises(SpecbuildError, match="the mask token is missing; add pard_token"):
        read_draft(tmp_path, geometry, strict=True)
