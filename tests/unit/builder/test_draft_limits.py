"""The drafts that CUDA engines support, and the batches that fit into a launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_target
from dflash_drafts import write_dflash
from p_eagle_drafts import write_p_eagle

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.step.programs import fits
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.family import DraftSizes
from specbuild.builder.families.registry import synth_draft
from specbuild.builder.synth.geometry import named_geometry
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

SHORT, LONG = DraftShape(1, 2, 2), DraftShape(1, 6, 6)


def test_a_block_of_dflash_runs_completely(tmp_path: Path) -> None:
    """The rows of a block bound the batch, for any shape of the draft."""
    write_target(tmp_path / "target")
    write_dflash(tmp_path / "draft")
    target = read_target(tmp_path / "target", strict=True).geometry
    draft = read_draft(tmp_path / "draft", target, strict=True).geometry
    assert fits(64, SHORT, 2)
    assert not fits(64, SHORT, 2, draft) and fits(32, SHORT, 2, draft)


def test_mask_rows_of_p_eagle_bound_the_batch(tmp_path: Path) -> None:
    """Pending rows and mask rows share a launch."""
    sizes = {"hidden": 96, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
    write_target(tmp_path / "target", layers=2, **sizes)
    write_p_eagle(tmp_path / "draft", target_layers=2, target_hidden=96, inner=64, **sizes)
    target = read_target(tmp_path / "target", strict=True).geometry
    draft = read_draft(tmp_path / "draft", target, strict=True).geometry
    assert fits(16, LONG, 6) and fits(16, LONG, 6, draft)
    assert fits(32, LONG, 6) and not fits(32, LONG, 6, draft)


def test_an_mtp_layer_of_a_supported_kind_is_supported() -> None:
    mimo = named_geometry("mimo-7b").target
    require_cuda_support(mimo, synth_draft("mtp").geometry(mimo, DraftSizes(1, 1)))


def test_experts_of_an_mtp_layer_need_a_format_that_kernels_decode() -> None:
    glm = named_geometry("glm-4.7-flash").target
    layer = synth_draft("mtp").geometry(glm, DraftSizes(1, 1))
    assert isinstance(layer, MtpGeometry)
    for dtype in ("bf16", "mxfp4"):
        require_cuda_support(glm, replace(layer, dtype=dtype))
    with pytest.raises(SpecbuildError, match="--draft-dtype fp8: the MTP layer has experts"):
        require_cuda_support(glm, replace(layer, dtype="fp8"))
