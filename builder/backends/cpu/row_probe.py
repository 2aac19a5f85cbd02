"""A small graph that tests whether ONNX Runtime's products depend on the number of rows.

On some processors a launch of one row, or of an odd number of rows, uses another kernel with other
bits. The runtime runs the graph when it loads an engine, and pads launches accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from specbuild.builder.backends.cpu.quantized_products import ACCURACY_LEVEL
from specbuild.plugins_cuda.body import CONTRIB_DOMAIN, STANDARD_OPSET
from specbuild.runtime.executors.cpu.row_padding import PROBE_COLUMNS as COLUMNS

# Rows of a weight: more than one tile of any kernel.
ROWS = 96
_IR_VERSION = 11


def row_probe(kernels: Sequence[tuple[int, int]]) -> bytes:
    """Return the serialized graph with one random product for each kernel (bits, block)."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["T", COLUMNS]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes, initializers, outputs = [], [], []
    for bits, block in kernels:
        name, blocks = f"int{bits}x{block}", COLUMNS // block
        codes = rng.integers(0, 256, (ROWS, blocks, block * bits // 8), dtype=np.uint8)
        scales = rng.uniform(0.01, 0.02, (ROWS, blocks)).astype(np.float32)
        weights = [
            ir.Value(name=f"{name}.{part}", const_value=ir.tensor(array, name=f"{name}.{part}"))
            for part, array in (("codes", codes), ("scales", scales))
        ]
        node = ir.node(
            "MatMulNBits",
            [x, *weights],
            {
                "K": COLUMNS,
                "N": ROWS,
                "bits": bits,
                "block_size": block,
                "accuracy_level": ACCURACY_LEVEL,
            },
            domain=CONTRIB_DOMAIN,
        )
        y = node.outputs[0]
        y.name, y.type = name, ir.TensorType(ir.DataType.FLOAT)
        y.shape = ir.Shape(["T", ROWS])
        nodes.append(node)
        initializers += weights
        outputs.append(y)
    graph = ir.Graph(
        [x],
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": STANDARD_OPSET, CONTRIB_DOMAIN: 1},
        name="row_probe",
    )
    model = ir.Model(graph, ir_version=_IR_VERSION)
    return ir.to_proto(model).SerializeToString(deterministic=True)
