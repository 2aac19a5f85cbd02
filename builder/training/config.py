"""What ``specbuild train draft`` is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import numbers
from specbuild.builder.training.options import OPTIMISATION, TEXT, TrainingOptions
from specbuild.runtime.errors import SpecbuildError

LARGEST_DRAFT_VOCAB = 32000
INNER_PER_HIDDEN = 4
_FITTING = "to fit the target"


@dataclass(frozen=True, kw_only=True)
class SelfText(OptionGroup):
    """Continuations by the target itself, made before training: what a draft is judged on.

    ``count`` rows of one sequence length: ``prompt_tokens`` of the training text (None: up to 32,
    a quarter of the row at most), and what the target says next (greedy at temperature 0).
    """

    PREFIX: ClassVar[str] = "self_text"
    PANEL: ClassVar[str] = TEXT

    count: Annotated[
        int,
        Described("Sequences the target writes to train on too.", "N", least=0, name="self_text"),
    ] = 0
    prompt_tokens: int | None = None
    temperature: Annotated[float, Described("How the target writes them.", "T", least=0.0)] = 0.0
    batch_size: int = 64


@dataclass(frozen=True, kw_only=True)
class LkLoss(OptionGroup):
    """Which LK loss is minimised in place of the kind's own (arXiv 2602.23881, section 4).

    Names as SpecForge has them; its ``kl_decay`` is 1 unless given, the paper's η is 3.
    """

    PANEL: ClassVar[str] = OPTIMISATION

    lk_loss_type: Annotated[
        Literal["lambda", "alpha"] | None,
        Described(
            "Loss on the acceptance rate a = sum of min(p, q): alpha, -log a; or lambda, "
            "w KL + (1 - w)(1 - a) with w = S exp(-D a) (arXiv 2602.23881).",
            "NAME",
            shown="the kind's own loss",
        ),
    ] = None
    kl_scale: Annotated[
        float, Described("Of lambda: the weight of KL at a = 0.", "S", least=0, most=1)
    ] = 1.0
    kl_decay: Annotated[
        float, Described("Of lambda: how fast a takes weight from KL.", "D", least=0)
    ] = 3.0

    def check(self) -> None:
        """Raises SpecbuildError where values are out of bounds, or of a loss that is not asked."""
        if not 0 <= self.kl_scale <= 1:
            raise SpecbuildError(f"train draft: kl_scale is {self.kl_scale}, expected 0 to 1")
        if not math.isfinite(self.kl_decay) or self.kl_decay < 0:
            raise SpecbuildError(f"train draft: kl_decay is {self.kl_decay}, expected 0 or more")
        unused = [name for name in self.given() if name != "lk_loss_type"]
        if unused and self.lk_loss_type != "lambda":
            raise SpecbuildError(
                f"train draft: {unused[0]} is of lk_loss_type lambda, which is "
                f"{self.lk_loss_type}; leave it out or ask for lambda"
            )


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingOptions):
    """Options of ``specbuild train draft``; None leaves a choice to the trainer.

    ``decay`` is the weight of a position over that of the one before, None as the kind's paper has
    it. Of a P-EAGLE draft's rows each further position is trained at the share ``keep``; a DFlash
    draft's blocks stand at ``anchors`` rows of a sequence. ``mask_token`` is theirs.
    ``aux_layers`` are 0-based target layers whose outputs the draft reads. ``dtype`` is the
    target's type and the autocast type of the draft, whose own weights train in fp32.
    """

    PANEL: ClassVar[str] = "Draft"

    steps: int = 2000
    learning_rate: float = 1e-4
    save_every: int = 500
    kind: Annotated[
        Literal["eagle3", "p-eagle", "dflash", "jetspec"],
        Described("Kind of draft: eagle3, p-eagle, dflash or jetspec.", "KIND"),
    ] = "eagle3"
    ttt_steps: Annotated[
        int, Described("Positions drafted in training: levels, or those of one pass.", "N", least=1)
    ] = 7
    layers: Annotated[
        int, Described("Its layers; one for eagle3.", "N", least=1, name="draft_layers")
    ] = 1
    decay: float | None = None
    keep: float = 0.8
    anchors: int = 64
    mask_token: Annotated[
        int | None,
        Described("Token of rows that have none.", "ID", least=0, shown="the rarest"),
    ] = None
    gradient_clip: float = 0.5
    draft_vocab: Annotated[
        int | None,
        Described("Tokens that the draft can say.", "N", least=1, shown=_FITTING),
    ] = None
    inner: Annotated[
        int | None,
        Described("Inner width of its MLP.", "N", least=1, shown=_FITTING),
    ] = None
    q_heads: Annotated[int | None, Described("Its query heads.", "N", least=1, shown=_FITTING)] = (
        None
    )
    kv_heads: Annotated[int | None, Described("Its KV heads.", "N", least=1, shown=_FITTING)] = None
    head_dim: Annotated[
        int | None, Described("Width of its heads.", "N", least=2, shown=_FITTING)
    ] = None
    rope_theta: Annotated[float, Described("Base of its rotary embedding.", "X")] = 10000.0
    aux_layers: Annotated[
        tuple[int, ...] | None,
        Described(
            "Target layers whose outputs it reads.",
            "I,J,K",
            name="taps",
            shown=_FITTING,
            typed=str,
            read=numbers,
        ),
    ] = None
    initial: Annotated[
        Path | None,
        Described(
            "Draft to begin from: what has the same name and shape.", "DIR", shown="random weights"
        ),
    ] = None
    self_text: SelfText = SelfText()
    lk: LkLoss = LkLoss()

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length", "ttt_steps", "save_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("layers", "anchors"):
            _at_least(name, getattr(self, name), 1)
        for name in ("draft_vocab", "inner", "q_heads", "kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "gradient_clip", "rope_theta", "keep"):
            _positive(name, getattr(self, name))
        if self.decay is not None:
            _positive("decay", self.decay)
        self._check_kind()
        self.lk.check()
        _at_least("seed", self.seed, 0)
        _at_least("held_out_rows", self.held_out_rows, 1)
        _fraction("held_out_fraction", self.held_out_fraction)
        _fraction("warmup_fraction", self.warmup_fraction)
        if self.time_limit_s is not None:
            _positive("time_limit_s", self.time_limit_s)
        if not self.texts:
            raise SpecbuildError("train draft: no text given; name at least one file or directory")
        if self.sequence_length < 2 * (self.ttt_steps + 1):
            raise SpecbuildError(
                f"train draft: sequence_length is {self.sequence_length}, expected at least "
                f"{2 * (self.ttt_steps + 1)} for {self.ttt_steps} test-time training steps"
            )
        self._check_heads()
        self._check_self_text()

    def _check_kind(self) -> None:
        if self.keep > 1:
            raise SpecbuildError(f"train draft: keep is {self.keep}, expected at most 1")
        if self.kind == "eagle3":
            if self.layers > 1:
                raise SpecbuildError(
                    f"train draft: layers is {self.layers}, an EAGLE3 draft is trained with one; "
                    "ask for --kind p-eagle or dflash"
                )
            if self.mask_token is not None:
                raise SpecbuildError(
                    f"train draft: mask_token is {self.mask_token}, but an EAGLE3 draft has no "
                    "rows of it; leave it out"
                )
        if self.kind in ("dflash", "jetspec") and self.draft_vocab is not None:
            raise SpecbuildError(
                f"train draft: draft_vocab is {self.draft_vocab}, but a {self.kind} draft says "
                "every token of the target's head; leave it out"
            )

    def _check_heads(self) -> None:
        if self.head_dim is not None and self.head_dim % 2:
            raise SpecbuildError(f"train draft: head_dim is {self.head_dim}, expected an even one")
        if self.q_heads and self.kv_heads and self.q_heads % self.kv_heads:
            raise SpecbuildError(
                f"train draft: q_heads {self.q_heads} is no multiple of kv_heads {self.kv_heads}"
            )

    def _check_self_text(self) -> None:
        text = self.self_text
        _at_least("self_text count", text.count, 0)
        _at_least("self_text batch_size", text.batch_size, 1)
        if not math.isfinite(text.temperature) or text.temperature < 0:
            raise SpecbuildError(
                f"train draft: self_text temperature is {text.temperature}, expected 0 or more"
            )
        if (
            text.prompt_tokens is not None
            and not 1 <= text.prompt_tokens <= self.sequence_length - self.ttt_steps - 2
        ):
            raise SpecbuildError(
                f"train draft: self_text prompt_tokens is {text.prompt_tokens}, expected 1 to "
                f"{self.sequence_length - self.ttt_steps - 2} at sequence_length "
                f"{self.sequence_length}"
            )


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecbuildError(f"train draft: {name} is {value}, expected {least} or more")


def _positive(name: str, value: float) -> None:
    if not math.isfinite(value) or value <= 0:
        raise SpecbuildError(f"train draft: {name} is {value}, expected more than 0")


def _fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise SpecbuildError(f"train draft: {name} is {value}, expected 0 or more and below 1")
