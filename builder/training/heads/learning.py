"""What a stage learns from a micro batch: two forward passes, the loss, and the gradients.

Nothing here waits for the device or copies to it from pageable memory, so that a CUDA graph can
hold all of it (:mod:`.graphed`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbuild.builder.training.heads.backbone import Backbone
from specbuild.builder.training.heads.losses import Lesson, terms, total
from specbuild.builder.training.heads.options import HeadOptions
from specbuild.builder.training.heads.stage import Stage
from specbuild.builder.training.heads.terms import ATTENTION_KL, HIDDEN_MSE
from specbuild.builder.training.objective import Batch


@dataclass(frozen=True)
class Learning:
    """How a stage that was entered takes a micro batch, kernel by kernel."""

    options: HeadOptions
    backbone: Backbone
    stage: Stage

    def __call__(self, rows: Batch) -> torch.Tensor:
        """Adds the gradients of some rows; returns their part of the terms, fp32 [terms]."""
        options, backbone, stage = self.options, self.backbone, self.stage
        keep: tuple[int, ...] = ()
        if HIDDEN_MSE in stage.losses:
            keep = options.hidden_layers or tuple(range(len(backbone.layers)))
        taught = any(name != ATTENTION_KL for name in stage.losses)
        teacher = backbone.teach(rows.ids, keep) if taught else None
        with backbone.switch.turned(True):  # the backward pass may compute layers again
            student = backbone.run(rows.ids, keep)
            positions = options.batch_size * rows.ids.shape[1]
            beside = {name: value / positions for name, value in stage.beside().items()}
            lesson = Lesson(
                teacher or student, student, rows.counted, positions, options.long_context, beside
            )
            found = terms(lesson, backbone.head, stage.losses)
            total(found, stage.losses).backward()
        return found.detach()
