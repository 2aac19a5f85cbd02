"""The dispatch table of attention to latents. The first rule that matches a launch applies.

Sizes are those of the engine, never those of a run. All decoding kernels of a layer return the
same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.plugins_cuda.dispatch import Rule
from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.plugins_cuda.mla_attention.cut import LatentCut, latent_cut
from specbuild.plugins_cuda.mla_attention.geometry import LatentGeometry


@dataclass(frozen=True)
class Facts:
    """The facts of a launch that the table tests; ``cut`` is None if rows are not divided."""

    shape: LatentGeometry
    prompt: bool
    cut: LatentCut | None

    @property
    def has_prompt_kernel(self) -> bool:
        """Whether the prompt kernels of plain attention support the rebuilt keys and values."""
        return self.prompt and self.shape.rebuilt and self.shape.v_width == self.shape.width

    @property
    def shares_keys(self) -> bool:
        """Whether the rows of a sequence share keys that an earlier launch rebuilt."""
        return self.cut is not None and self.cut.consumer_warpgroups > 1


TABLE: tuple[Rule[Facts], ...] = (
    Rule(
        "prompt",
        ("rebuild.cu", "prefill_full.cu", "prefill.cu"),
        "visible keys and values are rebuilt once for all rows; then a kernel of "
        "normal attention runs",
        lambda facts: facts.has_prompt_kernel,
        rows="prefill chunk",
        width="rebuilt; values as wide as keys",
    ),
    Rule(
        "absorbed_prompt",
        ("absorbed.cu", "prompt_values.cu"),
        "the rows fill the GPU: each has one split, and 16 rows share the products of "
        "the value projection",
        lambda facts: facts.prompt and not facts.shape.rebuilt,
        rows="prefill chunk",
        width="absorbed",
    ),
    Rule(
        "absorbed",
        ("absorbed.cu", "absorbed_values.cu"),
        "a cache entry is the key of all heads: 64 heads multiply a tile in one operation",
        lambda facts: not facts.shape.rebuilt,
        width="absorbed",
    ),
    Rule(
        "stored_listed",
        ("stored_keys.cu", "stored.cu", "selected.cu", "values.cu"),
        "rows that attend to everything share keys that are rebuilt once; the keys of "
        "a list are rebuilt for its row",
        lambda facts: facts.shape.has_lists and facts.shares_keys,
        rows="with lists (DSA), at least 3 per sequence",
        context="no window",
        width="rebuilt; the sums of two rows fit into registers",
    ),
    Rule(
        "listed",
        ("whole_rows.cu", "selected.cu", "values.cu"),
        "both rebuild keys during attention",
        lambda facts: facts.shape.has_lists,
        rows="with lists (DSA)",
        context="no window",
        width="rebuilt",
    ),
    Rule(
        "stored",
        ("stored_keys.cu", "stored.cu", "values.cu"),
        "keys are rebuilt once and shared, with two rows per warpgroup",
        lambda facts: facts.shares_keys,
        rows="at least 3 per sequence",
        context="no window",
        width="rebuilt; the sums of two rows fit into registers",
    ),
    Rule(
        "rebuilding",
        ("kernel.cu", "values.cu"),
        "for one or two rows a launch that stores keys costs more than it saves, so "
        "keys are rebuilt during attention",
        lambda _: True,
        width="rebuilt",
    ),
)


def facts_of(request: LoweringRequest, shape: LatentGeometry) -> Facts:
    """Return the facts of a request."""
    prompt = request.phase == "prefill"
    uncut = Facts(shape, prompt, None)
    cut = shape.rebuilt and not uncut.has_prompt_kernel
    return Facts(shape, prompt, latent_cut(request, shape)) if cut else uncut
