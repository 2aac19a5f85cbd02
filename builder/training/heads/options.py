"""Options of ``specbuild train mla`` and ``specbuild train dsa``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specbuild.builder.option_group import Described
from specbuild.builder.option_readers import listed, numbers, opposite
from specbuild.builder.training.heads.terms import (
    ATTENTION_KL,
    LOGITS_KL,
    LONG_LOGITS,
    TERMS,
)
from specbuild.builder.training.options import OPTIMISATION, RUN, TEXT, TrainingOptions
from specbuild.runtime.errors import SpecbuildError

Losses = tuple[tuple[str, float], ...]


def _losses(flag: str, entries: Sequence[str]) -> Losses:
    """Read terms and weights such as ``logits-kl=0.5``; SpecbuildError if a weight is no number."""
    return tuple(_loss(flag, entry) for entry in entries)


def _names(losses: Losses) -> str:
    return ", ".join(name for name, _ in losses)


def _loss(flag: str, entry: str) -> tuple[str, float]:
    name, _, weight = entry.partition("=")
    try:
        return name, float(weight or 1)
    except ValueError as error:
        raise SpecbuildError(
            f"{flag} {entry}: {weight!r} is not a number; write {name}=0.5"
        ) from error


@dataclass(frozen=True, kw_only=True)
class HeadOptions(TrainingOptions):
    """Options of both commands.

    ``batch_size`` is the number of sequences of a step in all processes. ``micro_batch_size`` is
    the number that a process runs at a time; None means all of its sequences. ``hidden_layers``
    are 0-based; None means all. ``dtype`` is that of the frozen backbone; new parameters and their
    optimiser's state are fp32. ``finish`` takes no step and writes the saved state.
    """

    micro_batch_size: Annotated[
        int | None,
        Described(
            "Sequences per forward pass of a device.",
            "N",
            name="micro_batch",
            least=1,
            panel=OPTIMISATION,
            shown="all",
        ),
    ] = None
    gradient_clip: float = 1.0
    losses: Annotated[
        Losses,
        Described(
            "Loss term and its weight; repeatable. docs/train-heads.md lists the terms.",
            "TERM[=W]",
            name="loss",
            panel=OPTIMISATION,
            shown=_names,
            typed=list[str],
            read=_losses,
        ),
    ] = ((LOGITS_KL, 1.0),)
    hidden_layers: Annotated[
        tuple[int, ...] | None,
        Described(
            "Layers for the term hidden-mse.",
            "LIST",
            panel=OPTIMISATION,
            shown="all",
            typed=str,
            read=numbers,
        ),
    ] = None
    long_context: Annotated[
        int,
        Described("First position of the term long-logits-l2.", "N", least=0, panel=OPTIMISATION),
    ] = 8192
    held_out_rows: Annotated[
        int, Described("Maximum number of evaluation sequences.", "N", least=1, panel=TEXT)
    ] = 32
    checkpointing: Annotated[
        bool,
        Described("Recompute activations in the backward pass to save memory.", panel=RUN),
    ] = False
    stored_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Described("Storage type of the tensors: float32 or bfloat16.", "TYPE", panel=RUN),
    ] = "bfloat16"
    finish: Annotated[
        bool,
        Described("With --resume: export the last save without further steps.", panel=RUN),
    ] = False

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
            raise SpecbuildError(
                "train: got no training text, expected at least one file or directory"
            )
        if self.finish and not self.resume:
            raise SpecbuildError("--finish ends an unfinished run; add --resume")
        self.check_losses(self.losses)

    def check_losses(self, losses: Losses) -> None:
        """Raise SpecbuildError for an unknown or repeated term, or a weight that is not above 0."""
        if not losses:
            raise SpecbuildError("train: got no loss, expected --loss NAME or NAME=WEIGHT")
        names = [name for name, _ in losses]
        for name, weight in losses:
            if name not in TERMS or names.count(name) > 1:
                raise SpecbuildError(
                    f"--loss {name}: expected each term once, of {', '.join(sorted(TERMS))}"
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
    """Options of ``specbuild train mla``.

    The latents start from the file ``initial`` of ``retrofit mla``. Without it they start from the
    factorization with ``rank``, calibrated on the training text. ``layers`` is a list such as
    ``0-11,15``; None means all. With ``lora_rank`` 0 ``o_proj`` does not change.
    """

    PANEL: ClassVar[str] = "Latents"

    rank: Annotated[
        int | None,
        Described("Start from the factorization of retrofit mla with this rank.", "R", least=1),
    ] = None
    initial: Annotated[Path | None, Described("Start from the latents in this file.", "FILE")] = (
        None
    )
    layers: Annotated[
        str | None, Described("Layers to change, for example 0-11,15.", "LIST", shown="all")
    ] = None
    lora_rank: Annotated[
        int, Described("Rank of LoRA on the output projections; 0 disables it.", "R", least=0)
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rank is None) == (self.initial is None):
            raise SpecbuildError(
                "train mla: expected either --rank, or --initial with a file of retrofit mla"
            )
        if self.initial is not None and self.layers is not None:
            raise SpecbuildError(
                "--layers: the file of --initial defines the layers; remove --layers"
            )
        _check("lora_rank", self.lora_rank, self.lora_rank >= 0, "0 or more")
        if ATTENTION_KL in dict(self.losses):
            raise SpecbuildError(f"--loss {ATTENTION_KL}: trains indexers; use train dsa")


@dataclass(frozen=True, kw_only=True)
class IndexerTraining(HeadOptions):
    """Options of ``specbuild train dsa``.

    ``steps`` train the indexers of ``layers`` with ``heads`` query heads of ``width``. ``layers``
    is a list; None means all full-attention layers. Latents beside the model do not change, and
    ``mla`` False ignores them. ``joint_steps`` then train both, with ``joint_losses`` and
    ``joint_learning_rate``. ``top_k`` are the numbers of tokens for the evaluation; training with
    sparse attention uses the first.
    """

    PANEL: ClassVar[str] = "Indexers"

    heads: Annotated[int, Described("Number of query heads of an indexer.", "N", least=1)] = 4
    width: Annotated[int, Described("Width of an indexer's heads and keys.", "N", least=1)] = 256
    layers: Annotated[
        str | None, Described("Layers to change, for example 0-11,15.", "LIST", shown="all")
    ] = None
    top_k: Annotated[
        tuple[int, ...],
        Described(
            "Numbers of selected tokens: the first for training, all for evaluation.",
            "K,...",
            shown=listed,
            typed=str,
            read=numbers,
        ),
    ] = (2048,)
    first_tokens: Annotated[
        int, Described("First tokens that are always included.", "N", least=0)
    ] = 4
    recent_tokens: Annotated[
        int, Described("Last tokens that are always included.", "N", least=1)
    ] = 64
    mla: Annotated[
        bool,
        Described(
            "Ignore latents in the checkpoint directory.",
            name="no_mla",
            typed=bool,
            read=opposite,
        ),
    ] = True
    joint_steps: Annotated[
        int, Described("Additional steps that also train latents.", "N", least=0)
    ] = 0
    joint_losses: Annotated[
        Losses,
        Described(
            "As --loss, for the joint steps.",
            "TERM[=W]",
            name="joint_loss",
            shown=_names,
            typed=list[str],
            read=_losses,
        ),
    ] = ((LOGITS_KL, 1.0), (ATTENTION_KL, 1.0))
    joint_learning_rate: Annotated[
        float, Described("Peak learning rate of the joint steps.", "X")
    ] = 2e-4
    sequence_length: int = 4096
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
                f"--top-k {min(self.top_k)}: selects all tokens of sequences of "
                f"{self.sequence_length}; raise --sequence-length or lower --top-k"
            )


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise SpecbuildError(f"train: {name} is {value}, expected {expected}")
