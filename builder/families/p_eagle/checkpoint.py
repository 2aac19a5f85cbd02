"""Reads a P-EAGLE draft: an EAGLE3 draft's tensors, and ``mask_hidden``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from specbuild.builder.checkpoint.audit import ExpectedTensor, audit
from specbuild.builder.checkpoint.config_json import Config
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.source import FLOAT_DTYPES, SourceTensor, open_directory
from specbuild.builder.families.eagle3.checkpoint import read_tensors
from specbuild.builder.families.eagle3.config import NormOutput, read_draft_config
from specbuild.builder.families.p_eagle.config import ARCHITECTURES, as_eagle3, mask_token
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry, PEagleRecord
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError

MASK_HIDDEN = "mask_hidden"
# The engine's tensor with fc's result for mask_hidden.
MASK_STATE = "mask_state"


def read_p_eagle(
    path: Path,
    top: Config,
    target: TargetGeometry,
    *,
    strict: bool,
    norm_output: NormOutput | None = None,
) -> DraftCheckpoint:
    """Read the draft at ``path``.

    Raises SpecbuildError if the draft is unsupported, has other tensors than required, or does not
    fit ``target``.
    """
    token = mask_token(top, target)
    config = read_draft_config(as_eagle3(top), target, strict, norm_output)
    stored = open_directory(path)
    masks = {name: stored.pop(name) for name in list(stored) if name == MASK_HIDDEN}
    if not masks:
        raise SpecbuildError(
            f"{path}: has no {MASK_HIDDEN}, the hidden state of mask rows; to build it as an "
            "EAGLE3 draft, remove the mask token from config.json"
        )
    draft = read_tensors(path, config, target, stored)
    assert isinstance(draft.geometry, Eagle3Geometry)
    fields = vars(draft.geometry) | {"architecture": ARCHITECTURES[0]}
    geometry = PEagleGeometry(**fields, mask_token=token)
    width = len(geometry.aux_layers) * target.hidden
    mask = masks[MASK_HIDDEN]
    leading = (1,) * max(len(mask.shape) - 1, 0)
    expected = ExpectedTensor((*leading[:2], width), FLOAT_DTYPES)
    audit(str(path), {MASK_HIDDEN: expected}, masks)
    engine_masks = mask_tensors(mask, draft.tensors, geometry)
    return replace(
        draft,
        geometry=geometry,
        tensors=draft.tensors | engine_masks,
        record=PEagleRecord,
    )


def mask_tensors(
    mask: SourceTensor, tensors: dict[str, SourceTensor], g: PEagleGeometry
) -> dict[str, SourceTensor]:
    """Return ``mask_hidden`` as one row [C], and its result after the norms and ``fc``, [1, H].

    The result is the same in every pass, so engines with graphs store it.
    """
    width = mask.shape[-1]
    row = replace(
        mask, shape=(width,), load=lambda: mask.load().reshape(width), file=None, offset=None
    )
    return {MASK_HIDDEN: row, MASK_STATE: _fused(mask, tensors, g)}


def _fused(mask: SourceTensor, tensors: dict[str, SourceTensor], g: PEagleGeometry) -> SourceTensor:
    states = range(len(g.aux_layers))
    norms = ["input_norm.weight"] if g.norm_before_fc else []
    norms += [f"fc_norm.{state}.weight" for state in states] if g.fc_norm else []
    parts = [mask, tensors["fc.weight"], *[tensors[name] for name in norms]]

    def load() -> torch.Tensor:
        x, fc, *weights = (part.load().float() for part in parts)
        rows = x.reshape(len(weights) or 1, -1)
        if weights:
            rows = torch.stack(
                [
                    F.rms_norm(row, row.shape, weight, g.rms_eps)
                    for row, weight in zip(rows, weights, strict=True)
                ]
            )
        return rows.reshape(1, -1) @ fc.T

    sources = tuple(source for part in parts for source in part.sources)
    return SourceTensor(MASK_STATE, "F32", (1, g.hidden), sources, load, None, None)
