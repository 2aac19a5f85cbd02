"""The target as a frozen teacher: tapped layer outputs and logits of whole sequences."""

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
class Teaching:
    """What the draft learns from: ``aux_hidden`` [B, T, aux_layers·H] and ``logits`` [B, T, V]."""

    aux_hidden: torch.Tensor
    logits: torch.Tensor


class FrozenTarget:
    """A checkpoint that only runs forward."""

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...]) -> None:
        self.model = model
        self.aux_layers = aux_layers
        self._outputs: dict[int, torch.Tensor] = {}
        for layer in set(aux_layers):
            model.model.layers[layer].register_forward_hook(self._keep(layer))

    def _keep(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def teach(self, ids: torch.Tensor) -> Teaching:
        """Aux hidden states and logits of ``ids`` [B, T]; an aux hidden state is a layer's output
        after its residual addition, before any norm."""
        logits = self.model(ids, use_cache=False).logits
        aux_hidden = torch.cat([self._outputs[layer] for layer in self.aux_layers], dim=-1)
        self._outputs.clear()
        return Teaching(aux_hidden=aux_hidden, logits=logits)


def load_target(
    path: Path, *, device: str = "cpu", dtype: str = "float32", teacher: bool = True
) -> PreTrainedModel:
    """Load a checkpoint directory or a GGUF file into transformers, dequantised and frozen.

    A ``teacher`` uses the family's fastest implementation; its family must support training.

    Raises:
        SpecbuildError: ``path`` is no checkpoint of such a family, or ``device`` does not exist.
    """
    import transformers

    opened = open_target(path, gguf_forms())
    config = opened.config.fields
    family, class_name = _family(path, config.get("model_type"), teacher=teacher)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SpecbuildError("device cuda: this machine has no usable CUDA device; use device cpu")
    options = _source(path, opened, family, class_name) | family.reference.load_options(
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
    if info["missing_keys"]:  # transformers initialises them randomly
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise SpecbuildError(f"{path}: transformers finds no weights for {missing}")
    # The reader leaves dequantised experts in bf16 whatever type was asked for.
    model = model.to(device=device, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
    if teacher and family.teacher is not None:
        family.teacher(model)
    return model


def _family(path: Path, model_type: object, *, teacher: bool) -> tuple[TargetFamily, str]:
    """The family of this model type, and the class of transformers that it is."""
    known = {
        kind: (family, class_name)
        for family in TARGETS.values()
        if family.teacher is not None or not teacher
        for kind, class_name in {**family.model_types, **family.reference.classes}.items()
    }
    if not isinstance(model_type, str) or model_type not in known:
        expected = " or ".join(map(repr, known))
        raise SpecbuildError(f"{path}: model_type is {model_type!r}, expected {expected}")
    return known[model_type]


def _source(
    path: Path, opened: OpenedTarget, family: TargetFamily, class_name: str
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for the checkpoint: its directory, or config and weights.

    Weights of a quantized checkpoint are dequantized here: transformers would need the packages
    and the devices of every format, and rounds activations where the scheme does.
    """
    floats = float_tensors(opened.tensors(), opened.config, strict=False)
    is_converted = is_gguf(path) or opened.is_text_part
    if not is_converted and floats.quantization is None:
        return {"pretrained_model_name_or_path": path}
    import transformers

    fields = dict(opened.config.fields)
    if floats.quantization is not None:
        del fields[QUANTIZATION]
    # Some classes default to the padding token of a published model, whose row would be zeroed.
    fields = {"pad_token_id": None, **fields}
    kind = getattr(transformers, class_name).config_class
    config = kind.from_dict(fields | {"model_type": kind.model_type})
    renamed = family.reference.stored_name if is_converted else str
    weights = {renamed(name): tensor.load() for name, tensor in floats.tensors.items()}
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": weights}


def end_of_text_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The target's end-of-sequence ids, the first being the separator of documents."""
    ids = model.generation_config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its bars and its remarks on MXFP4 kernels would mix with our own progress."""
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
