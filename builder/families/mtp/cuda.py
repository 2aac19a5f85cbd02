"""MTP layers in CUDA engines: drafted level by level, by a block of the target's kind."""

from __future__ import annotations

from specbuild.builder.backends.cuda.kernel_limits import require_quantized_experts
from specbuild.builder.backends.cuda.step.draft import CudaDraft
from specbuild.builder.backends.cuda.step.draft_levels import LEVELS
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.feed_forward import routed_part
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def _require(_target: TargetGeometry, draft: MtpGeometry) -> None:
    """See :class:`CudaDraft`: the block has the target's sizes, embedding and head."""
    moe = routed_part(draft.feed_forward)
    if moe is not None:
        require_quantized_experts("--draft-dtype", "the MTP layer", draft.dtype, moe)


MTP_CUDA = CudaDraft(LEVELS, _require)
