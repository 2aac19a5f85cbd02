"""P-EAGLE in CUDA engines: the pass that ingests tokens also drafts all levels at mask rows."""

from __future__ import annotations

from specbuild.builder.backends.cuda.kernel_limits import require_draft_layers
from specbuild.builder.backends.cuda.step.draft import CudaDraft, Drafting
from specbuild.builder.backends.cuda.step.draft_levels import LevelStep
from specbuild.builder.backends.cuda.step.draft_trees import tree_of_levels
from specbuild.builder.backends.cuda.step.ir import Tensor
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleGeometry


class MaskRowStep(LevelStep):
    """See :class:`DraftStep`: mask rows follow the rows that the draft ingests."""

    def tree(self, drafting: Drafting) -> dict[str, Tensor]:
        """See :class:`DraftStep`."""
        geometry, shape = drafting.draft.geometry, drafting.shape
        assert isinstance(geometry, PEagleGeometry)
        masks = geometry.mask_rows(shape.draft_depth)
        token = geometry.mask_token if masks else 0
        rows = drafting.pending_rows(0, drafting.batch, masks=masks, mask_token=token)
        _, expanded = drafting.run(rows, drafting.fused_states(rows), level=None)
        return tree_of_levels(drafting.parts, drafting.program, shape, expanded)


P_EAGLE_CUDA = CudaDraft(MaskRowStep(), require_draft_layers)
