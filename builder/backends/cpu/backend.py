"""The ``cpu`` backend: every role becomes a graph of standard ops for ONNX Runtime."""

from __future__ import annotations

from functools import partial

from specbuild.builder.backends.backend import (
    Lowered,
    PortableGraphs,
    TakenOptions,
    collected_weights,
    run_role_passes,
)
from specbuild.builder.backends.cpu.lowering import cpu_passes
from specbuild.builder.backends.cpu.quantized_products import (
    QuantizedWeights,
    quantize_products,
)
from specbuild.builder.backends.cpu.row_probe import row_probe
from specbuild.builder.backends.foreign_options import (
    refuse_kernel_options,
    refuse_tensorrt_options,
)
from specbuild.builder.engine.backend_sizes import DEFAULT_TREE_LIMITS, BackendSizes
from specbuild.builder.engine.manifest import graph_file
from specbuild.builder.engine.sizes import EnginePlan
from specbuild.builder.engine.writer import weight_places
from specbuild.builder.graph.passes.portable import portable_bytes
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.plugins_cuda.kv_write.op import POOL_BODY_AXES
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cpu.row_padding import PROBE_FILE

SIZES = BackendSizes(
    page_size=16,
    draft_limits=DEFAULT_TREE_LIMITS,
    prefill_rows=256,
    cache_dtype="float32",
    pool_axes=POOL_BODY_AXES,
    draft_dtype="fp32",
)


class CpuBackend:
    """See :class:`Backend`; it builds every model, in the types of its checkpoint."""

    facts = facts_of("cpu")
    sizes = SIZES
    activations = None

    def options(self, asked: BuildOptions) -> TakenOptions:
        """See :class:`Backend`."""
        refuse_tensorrt_options(asked)
        refuse_kernel_options(asked)
        return TakenOptions(asked, self.facts.name)

    def check(
        self,
        asked: BuildOptions,  # noqa: ARG002
        target: TargetGeometry,
        draft: DraftGeometry | None,  # noqa: ARG002
    ) -> None:
        """See :class:`Backend`: rounded weights alone are refused somewhere."""
        if target.dtype is None:
            return
        what, moe = None, target.moe
        if target.dtype == "fp8" and moe is not None and moe.storage != "mxfp4":
            what = f"experts in {moe.storage} beside fp8"
        if target.mla is not None:
            what = f"a {target.model_type}"
        if what is not None:
            raise SpecbuildError(
                f"--weights-dtype {target.dtype}: on a CPU it shows what a CUDA engine of the "
                f"model would give, and there is none of {what}; leave it out"
            )

    def check_plan(self, plan: EnginePlan) -> tuple[str, ...]:
        """See :class:`Backend`: blocks of keys that are codes are refused."""
        if plan.specpv is not None and plan.choosing_group.coded:
            raise SpecbuildError(
                "--kv-dtype fp8: SpecPV chooses blocks by keys that are no codes; leave --specpv "
                "or --kv-dtype out, or take --specpv-score indexer"
            )
        return ()

    def lower(self, graphs: PortableGraphs, taken: TakenOptions, progress: Progress) -> Lowered:
        """See :class:`Backend`."""
        models, dump = graphs.models, taken.asked.dump_passes
        coded = [group.name for group in graphs.plan.groups if group.coded]
        found, quantizes = QuantizedWeights(), None
        exact = taken.asked.cpu.math == "exact"
        if taken.asked.kernels.weights_dtype in (None, "checkpoint"):
            quantizes = partial(quantize_products, exact=exact, found=found)
        rounds_to = graphs.sources.target_geometry.dtype
        made = partial(cpu_passes, rounds_to=rounds_to, coded_groups=coded, quantized=quantizes)
        passes = run_role_passes(models, made, dump, progress)
        weights = collected_weights(models)
        places = weight_places(weights)
        files = {graph_file(role): portable_bytes(model, places) for role, model in models.items()}
        if quantizes is not None:
            found.add_others(graphs.sources.quantized.values())
        quantized = found.record(exact=exact)
        if quantized is not None and quantized.kernels and not exact:
            files[PROBE_FILE] = row_probe(quantized.kernels)
        return Lowered(graphs.plan, models, files, weights, passes, quantized=quantized)


CPU = CpuBackend()
