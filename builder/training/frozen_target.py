"""The target as a frozen teacher: hidden states of layers, and logits, of full sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbuild.builder.checkpoint.config_fields import QUANTIZATION
from specbuild.builder.checkpoint.gguf.container import is_gguf
from specbuild.builder.checkpoint.opened import OpenedTarget, open_target
from specbuild.builder.checkpoint.quantization.registry import float_tensors
from specbuild.builder.families.family import TargetFamily
from specbuild.builder.families.registry import TARGETS, gguf_forms
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TeacherOutputs:
    """A draft's labels: ``aux_hidden`` [B, T, aux_layers·H] and ``logits`` [B, T, V]."""

    aux_hidden: torch.Tensor
    logits: torch.Tensor


class FrozenTarget:
    """A checkpoint without gradients."""

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...]) -> None:
        self.model = model
        self.aux_layers = aux_layers
        self._outputs: dict[int, torch.Tensor] = {}
        for layer in set(aux_layers):
            model.model.layers[layer].register_forward_hook(self._make_hook(layer))

    def _make_hook(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def teach(self, ids: torch.Tensor) -> TeacherOutputs:
        """Return hidden states and logits of ``ids`` [B, T].

        A hidden state is a layer's output after the residual addition, before any norm.
        """
        logits = self.model(ids, use_cache=False).logits
        aux_hidden = torch.cat([self._outputs[layer] for layer in self.aux_layers], dim=-1)
        self._outputs.clear()
        return TeacherOutputs(aux_hidden=aux_hidden, logits=logits)


def load_target(
    path: Path, *, device: str = "cpu", dtype: str = "float32", teacher: bool = True
) -> PreTrainedModel:
    """Load a checkpoint directory or a GGUF file into transformers, dequantized and frozen.

    With ``teacher`` the model uses the family's fastest implementation, and the family must support
    training.

    Raises:
        SpecbuildError: ``path`` has no such checkpoint, or ``device`` does not exist.
    """
    import transformers

    opened = open_target(path, gguf_forms())
    config = opened.config.fields
    family, class_name = _family(path, config.get("model_type"), teacher=teacher)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SpecbuildError("device cuda: this machine has no usable CUDA device; use device cpu")
    options = _load_arguments(path, opened, family, class_name) | family.reference.load_options(
        path, config
    )
    try:
        with _quiet_transformers():
            model, info = getattr(transformers, class_name).from_pretrained(
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecbuildError(
            f"{path}: transformers cannot load this target: {first_line}"
        ) from error
    if info["missing_keys"]:  # transformers would initialize them randomly
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise SpecbuildError(f"{path}: the checkpoint has no weights for {missing}")
    # transformers leaves dequantized experts in bf16, regardless of the requested type.
    model = model.to(device=device, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
    if teacher and family.teacher is not None:
        family.teacher(model)
    return model


def _family(path: Path, model_type: object, *, teacher: bool) -> tuple[TargetFamily, str]:
    """Return the family of this model type, and its class in transformers."""
    supported = {
        kind: (family, class_name)
        for family in TARGETS.values()
        if family.teacher is not None or not teacher
        for kind, class_name in {**family.model_types, **family.reference.classes}.items()
    }
    if not isinstance(model_type, str) or model_type not in supported:
        expected = " or ".join(map(repr, supported))
        raise SpecbuildError(f"{path}: model_type is {model_type!r}, expected {expected}")
    return supported[model_type]


def _load_arguments(
    path: Path, opened: OpenedTarget, family: TargetFamily, class_name: str
) -> dict[str, Any]:
    """Return arguments of ``from_pretrained``: the checkpoint's directory, or config and weights.

    Weights of a quantized checkpoint are dequantized here. transformers would require the packages
    and devices of every format, and would round activations if the scheme does.
    """
    floats = float_tensors(opened.tensors(), opened.config, strict=False)
    is_converted = is_gguf(path) or opened.is_text_part
    if not is_converted and floats.quantization is None:
        return {"pretrained_model_name_or_path": path}
    import transformers

    fields = dict(opened.config.fields)
    if floats.quantization is not None:
        del fields[QUANTIZATION]
    # Some classes default to a published model's padding token, whose row would become 0.
    fields = {"pad_token_id": None, **fields}
    config_class = getattr(transformers, class_name).config_class
    config = config_class.from_dict(fields | {"model_type": config_class.model_type})
    stored_name = family.reference.stored_name if is_converted else str
    weights = {stored_name(name): tensor.load() for name, tensor in floats.tensors.items()}
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": weights}


def end_of_text_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the target's end-of-sequence ids; the first separates documents."""
    ids = model.generation_config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and messages, which would mix with specbuild's."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
