"""Moe on a CPU: all experts as two Gemms, or only selected ones, with ONNX Runtime's op if
possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from specbuild.plugins_cuda.body import BodyBuilder, DeriveWeight, static_size
from specbuild.plugins_cuda.moe.chosen import chosen_body, chosen_weights
from specbuild.plugins_cuda.moe.contrib import contrib_body, contrib_weights, cpu_form
from specbuild.plugins_cuda.moe.dense import dense_body, dense_spread, dense_weights

if TYPE_CHECKING:
    import torch


def weighted_body(
    b: BodyBuilder,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    derive: DeriveWeight,
) -> Sequence[ir.Value]:
    """Return the outputs of the fastest body, with weights derived from the declared ones."""
    x, logits, weights = *inputs[:2], inputs[2:8]
    choice_bias, scale = inputs[8:10]
    gate_up = weights[0]
    assert x is not None and logits is not None and gate_up is not None
    assert gate_up.name is not None
    experts = static_size(gate_up, 0)
    # MXFP4 blocks are [E, 2I, H/32, 16], plain weights [E, H, 2I].
    inner = static_size(gate_up, 2 if weights[1] is None else 1) // 2
    prefix = gate_up.name.rsplit(".", 1)[0]
    make: Callable[..., dict[str, torch.Tensor]] = contrib_weights
    form: Callable[..., ir.Value] = contrib_body
    names = {key: f"{prefix}.{key}" for key in ("w1", "b1", "w2", "b2")}
    looped = attributes["activation"] == "geglu_tanh" or scale is not None
    if looped:
        make = chosen_weights
        names = {key: f"{prefix}.chosen.{key}" for key in names}
    elif cpu_form(experts, inner) == "dense":
        settings = {name: attributes[name] for name in ("alpha", "activation")}
        make, form = partial(dense_weights, **settings), dense_body
        names = {key: f"{prefix}.dense.{key}" for key in names}

    def part(key: str, *tensors: torch.Tensor | None) -> torch.Tensor:
        return make(*tensors)[key]

    derived = {key: derive(name, weights, partial(part, key)) for key, name in names.items()}
    if looped:
        return [chosen_body(b, x, (logits, choice_bias, scale), derived, attributes)]
    if form is dense_body:
        # The same for every layer, and derived from no tensor of the checkpoint.
        name = f"expert_spread.{experts}x{inner}"
        derived["spread"] = derive(name, (), partial(dense_spread, experts, inner))
    return [form(b, x, logits, choice_bias, derived, attributes, experts=experts)]
