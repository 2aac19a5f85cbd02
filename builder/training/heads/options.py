"""What ``specbuild train mla`` and ``specbuild train dsa`` are asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbuild.builder.training.heads.losses import (
    ATTENTION_KL,
    LOGITS_KL,
    LONG_LOGITS,
    TERMS,
)
from specbuild.runtime.errors import SpecbuildError

Losses = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What both commands have.

    ``texts`` and ``held_out`` are files or directories; without ``held_out`` the share
    ``held_out_fraction`` of the documents is kept from training. ``batch_size`` counts the
    sequences of a step over all processes, ``micro_batch_size`` those that one process runs at a
    time (None: all it has). ``hidden_layers`` are 0-based, None for all. ``dtype`` is the frozen
    backbone's; new parameters and their optimiser's state are fp32. ``time_limit_s`` ends this run
    early, ready for ``resume``; ``finish`` then takes no further step and writes what was reached.
    """

    model: Path
    texts: tuple[Path, ...]
    output: Path
    steps: int = 1000
    batch_size: int = 8
    micro_batch_size: int | None = None
    sequence_length: int = 512
    learning_rate: float = 4e-4
    warmup_fraction: float = 0.03
    gradient_clip: float = 1.0
    losses: Losses = ((LOGITS_KL, 1.0),)
    hidden_layers: tuple[int, ...] | None = None
    long_context: int = 8192
    held_out: tuple[Path, ...] = ()
    held_out_fraction: float = 0.02
    held_out_rows: int = 32
    checkpointing: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    stored_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: int = 0
    save_every: int = 200
    resume: bool = False
    finish: bool = False
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "sequence_length", "held_out_rows", "save_every")
        for name in counts:
            _check(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("learning_rate", "gradient_clip"):
            value = getattr(self, name)
            _check(name, value, math.isfinite(value) and value > 0, "more than 0")
        for name in ("warmup_fraction", "held_out_fraction"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < 1, "0 or more, below 1")
        _check("sequence_length", self.sequence_length, self.sequence_length >= 2, "2 or more")
        _check("long_context", self.long_context, self.long_context >= 0, "0 or more")
        if self.micro_batch_size is not None:
            _check("micro_batch_size", self.micro_batch_size, self.micro_batch_size >= 1, "1 up")
        if not self.texts:
            raise SpecbuildError("train: no text given; name at least one file or directory")
        if self.finish and not self.resume:
            raise SpecbuildError("--finish ends an unfinished run; give --resume with it")
        self.check_losses(self.losses)

    def check_losses(self, losses: Losses) -> None:
        """SpecbuildError for a term that there is not, one named twice, or a weight below 0."""
        if not losses:
            raise SpecbuildError("train: no loss to minimise; give --loss NAME or NAME=WEIGHT")
        names = [name for name, _ in losses]
        for name, weight in losses:
            if name not in TERMS or names.count(name) > 1:
                raise SpecbuildError(
                    f"--loss {name}: expected each once of {', '.join(sorted(TERMS))}"
                )
            _check(f"the weight of {name}", weight, math.isfinite(weight) and weight > 0, "above 0")
            if name == LONG_LOGITS and self.long_context >= self.sequence_length:
                raise SpecbuildError(
                    f"--loss {name}: sequences of {self.sequence_length} tokens never reach the "
                    f"context of {self.long_context}; raise --sequence-length or lower "
                    "--long-context"
                )


@dataclass(frozen=True, kw_only=True)
class LatentTraining(HeadOptions):
    """``specbuild train mla``.

    The latents start as ``initial`` (a file of ``retrofit mla``); without it, as those of
    ``rank`` that ``retrofit mla`` makes with the training text to calibrate on. ``layers`` is a
    list such as ``0-11,15``, None for all. ``lora_rank`` 0 leaves ``o_proj`` as it is.
    """

    rank: int | None = None
    initial: Path | None = None
    layers: str | None = None
    lora_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rank is None) == (self.initial is None):
            raise SpecbuildError(
                "train mla: give either --rank, or --initial with the file of a retrofit mla"
            )
        if self.initial is not None and self.layers is not None:
            raise SpecbuildError("--layers: the file of --initial says which layers have a latent")
        _check("lora_rank", self.lora_rank, self.lora_rank >= 0, "0 or more")
        if ATTENTION_KL in dict(self.losses):
            raise SpecbuildError(f"--loss {ATTENTION_KL}: it trains an indexer; see train dsa")


@dataclass(frozen=True, kw_only=True)
class IndexerTraining(HeadOptions):
    """``specbuild train dsa``.

    ``steps`` train the indexers of ``layers`` (a list, None for all with full attention), each of
    ``heads`` query heads ``width`` wide. Latents beside the model stay as they are, unless ``mla``
    is false, where they are left out; ``joint_steps`` more then train both, by
    ``joint_losses`` at ``joint_learning_rate``. ``top_k`` are the numbers of tokens to judge with;
    where training narrows attention, it does by the first.
    """

    heads: int = 4
    width: int = 256
    layers: str | None = None
    top_k: tuple[int, ...] = (2048,)
    first_tokens: int = 4
    recent_tokens: int = 64
    mla: bool = True
    joint_steps: int = 0
    joint_losses: Losses = ((LOGITS_KL, 1.0), (ATTENTION_KL, 1.0))
    joint_learning_rate: float = 2e-4
    learning_rate: float = 1e-3
    losses: Losses = ((ATTENTION_KL, 1.0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_losses(self.joint_losses)
        for name in ("heads", "width", "recent_tokens"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("first_tokens", "joint_steps"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        rate = self.joint_learning_rate
        _check("joint_learning_rate", rate, math.isfinite(rate) and rate > 0, "more than 0")
        if not self.top_k or min(self.top_k) < 1:
            raise SpecbuildError(f"--top-k: got {self.top_k}, expected numbers of 1 or more")
        if min(self.top_k) + self.first_tokens + self.recent_tokens >= self.sequence_length:
            raise SpecbuildError(
                f"--top-k {min(self.top_k)}: sequences of {self.sequence_length} tokens are never "
                "narrowed by it; raise --sequence-length or lower --top-k"
            )


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise SpecbuildError(f"train: {name} is {value}, expected {expected}")
