"""The sizes of an engine as a build computes them."""

from __future__ import annotations

from specbuild.builder.backends.registry import backend_of
from specbuild.builder.engine import sizes
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry


def compute_engine_sizes(
    options: BuildOptions, target: TargetGeometry, draft: Eagle3Geometry | None
) -> sizes.EngineSizes:
    """Compute the sizes for the backend that the options name."""
    drafts = {} if draft is None else {"draft": draft}
    return sizes.compute_engine_sizes(options, backend_of(options.backend).sizes, target, drafts)
