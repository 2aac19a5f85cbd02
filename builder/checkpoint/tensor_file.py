"""Writes a safetensors file of tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from specbuild.builder.durable import replace_bytes
from specbuild.runtime.errors import SpecbuildError


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors; the file appears atomically, with the permissions of any new file.

    (``safetensors.torch.save_file`` makes it readable for its owner only.) Raises SpecbuildError if
    the disk refuses.
    """
    try:
        replace_bytes(file, save(dict(tensors), metadata={"format": "pt"}))
    except OSError as error:
        raise SpecbuildError(
            f"{file} cannot be written ({error.strerror}); free some space or name another place"
        ) from error
