"""Which kernels attend to latents: one table, of which the first rule that takes a launch decides.

Sizes are the engine's, never those of a run. All forms of one layer for decoding give the same
bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.dispatch import Rule
from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.plugins_cuda.mla_attention.cut import LatentCut, latent_cut
from specbuild.plugins_cuda.mla_attention.geometry import LatentGeometry


@dataclass(frozen=True)
class Facts:
    """What the table is asked of a launch; ``cut`` is None where nothing is cut into rows."""

    shape: LatentGeometry
    prompt: bool
    cut: LatentCut | None

    @property
    def has_prompt_kernel(self) -> bool:
        """Whether plain attention's prompt kernels take what was rebuilt."""
        return self.prompt and self.shape.rebuilt and self.shape.v_width == self.shape.width

    @property
    def shares_keys(self) -> bool:
        """Whether rows of a sequence share keys that were rebuilt in front."""
        return self.cut is not None and self.cut.consumer_warpgroups > 1


TABLE: tuple[Rule[Facts], ...] = (
    Rule(
        "prompt",
        ("rebuild.cu", "prefill_full.cu", "prefill.cu"),
        "keys and values of what the rows see are rebuilt once for all of them; then one of plain "
        "attention's kernels attends",
        lambda facts: facts.has_prompt_kernel,
        rows="of a prompt's chunk",
        width="rebuilt; values as wide as keys",
    ),
    Rule(
        "absorbed_prompt",
        ("absorbed.cu", "prompt_values.cu"),
        "rows fill the GPU by their number: each has one split, and 16 of them share the products "
        "that make values",
        lambda facts: facts.prompt and not facts.shape.rebuilt,
        rows="of a prompt's chunk",
        width="absorbed",
    ),
    Rule(
        "absorbed",
        ("absorbed.cu", "absorbed_values.cu"),
        "a cache entry is every head's key: 64 heads multiply a tile of it at once",
        lambda facts: not facts.shape.rebuilt,
        width="absorbed",
    ),
    Rule(
        "stored_listed",
        ("stored_keys.cu", "stored.cu", "selected.cu", "values.cu"),
        "rows that see everything share keys that are rebuilt once; a list's keys are rebuilt for "
        "its row alone",
        lambda facts: facts.shape.has_lists and facts.shares_keys,
        rows="with lists (DSA), 3 of a sequence or more",
        context="no window",
        width="rebuilt; sums of two rows fit the registers",
    ),
    Rule(
        "listed",
        ("whole_rows.cu", "selected.cu", "values.cu"),
        "both rebuild keys while they attend",
        lambda facts: facts.shape.has_lists,
        rows="with lists (DSA)",
        context="no window",
        width="rebuilt",
    ),
    Rule(
        "stored",
        ("stored_keys.cu", "stored.cu", "values.cu"),
        "keys are rebuilt once and rows share them, two to a warpgroup",
        lambda facts: facts.shares_keys,
        rows="3 of a sequence, or more",
        context="no window",
        width="rebuilt; sums of two rows fit the registers",
    ),
    Rule(
        "rebuilding",
        ("kernel.cu", "values.cu"),
        "a row or two would not earn back a launch that stores keys: they are rebuilt while it "
        "attends",
        lambda _: True,
        width="rebuilt",
    ),
)


def facts_of(request: LoweringRequest, shape: LatentGeometry) -> Facts:
    """What the table is asked of a request."""
    prompt = request.phase == "prefill"
    whole = Facts(shape, prompt, None)
    cut = shape.rebuilt and not whole.has_prompt_kernel
    return Facts(shape, prompt, latent_cut(request, shape)) if cut else whole
