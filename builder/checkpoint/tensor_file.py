"""A safetensors file of tensors that are in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from specbuild.builder.durable import replace_bytes
from specbuild.runtime.errors import SpecbuildError


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes them; the file appears whole or not at all, with the rights of any new file.

    (``safetensors.torch.save_file`` leaves it readable for its owner alone.) SpecbuildError where
    the disk refuses.
    """
    try:
        replace_bytes(file, save(dict(tensors), metadata={"format": "pt"}))
    except OSError as error:
        raise SpecbuildError(
            f"{file} cannot be written ({error.strerror}); free some space or name another place"
        ) from error
