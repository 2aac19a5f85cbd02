"""EAGLE3 in CUDA engines: one layer, drafted level by level."""

from __future__ import annotations

from specbuild.builder.backends.cuda.kernel_limits import require_draft_layers
from specbuild.builder.backends.cuda.step.draft import CudaDraft
from specbuild.builder.backends.cuda.step.draft_levels import LEVELS
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError


def _require(target: TargetGeometry, draft: Eagle3Geometry) -> None:
    """See :class:`CudaDraft`."""
    if draft.layers > 1:
        raise SpecbuildError(
            f"the draft has {draft.layers} layers, which only CPU engines support; build with "
            "--backend cpu or without --draft"
        )
    require_draft_layers(target, draft)


EAGLE3_CUDA = CudaDraft(LEVELS, _require)
