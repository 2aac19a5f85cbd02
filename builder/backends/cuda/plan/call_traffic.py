"""What the calls of a program read and compute, by the declarations of their ops."""

from __future__ import annotations

from specbuild.builder.backends.cuda.step.ir import Call
from specbuild.plugins_cuda.traffic import NoTraffic, TrafficRequest
from specbuild.runtime.engine_dir.traffic import Traffic


def call_traffic(call: Call) -> Traffic | None:
    """None where the op says that it is nothing to speak of."""
    stored = [name for name, tensor in call.inputs.items() if tensor.storage.space == "weights"]
    declared = call.op.traffic
    if declared is None or isinstance(declared, NoTraffic):
        if stored:
            raise AssertionError(f"{call.op.name} reads {stored} and declares no traffic")
        return None
    infos = {name: tensor.info for name, tensor in call.tensors.items()}
    return declared(TrafficRequest(infos, call.attributes, stored))
