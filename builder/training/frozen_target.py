"""The target as a frozen teacher: tapped layer outputs and logits of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbuild.builder.checkpoint.source import read_json, refuse_gguf
from specbuild.builder.families.family import TargetFamily
from specbuild.builder.families.registry import TARGETS
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
    """The checkpoint in transformers, dequantised, frozen, in evaluation mode.

    As a ``teacher`` it is made quick, and must be of a family that drafts are trained for.

    Raises:
        SpecbuildError: ``path`` is a checkpoint of no such family, or ``device`` is not there.
    """
    import transformers

    config = read_config(path)
    family, class_name = _family(path, config.get("model_type"), teacher=teacher)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SpecbuildError("device cuda: this machine has no usable CUDA device; use device cpu")
    options = {"pretrained_model_name_or_path": path} | family.reference.load_options(path, config)
    try:
        with _quiet_transformers():
            model: Any = getattr(transformers, class_name).from_pretrained(
                dtype=getattr(torch, dtype), attn_implementation="eager", **options
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecbuildError(
            f"{path}: transformers cannot load this target: {first_line}"
        ) from error
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


def read_config(path: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory.

    Raises:
        SpecbuildError: there is none, or it is no JSON object.
    """
    refuse_gguf(path)
    file = path / "config.json"
    if not file.exists():
        raise SpecbuildError(f"{path}: no config.json, so no checkpoint directory")
    return read_json(file)


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
