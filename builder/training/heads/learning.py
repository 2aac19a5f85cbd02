"""Runs a micro batch of a stage: two forward passes, the loss, and the gradients.

This module neither waits for the device nor copies to it from pageable memory, so that a CUDA graph
can capture it (:mod:`.graphed`).
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
    """Runs a micro batch of a stage kernel by kernel; the stage has been entered."""

    options: HeadOptions
    backbone: Backbone
    stage: Stage

    def __call__(self, rows: Batch) -> torch.Tensor:
        """Add the gradients of some rows; return their part of the terms, fp32 [terms]."""
        options, backbone, stage = self.options, self.backbone, self.stage
        keep: tuple[int, ...] = ()
        if HIDDEN_MSE in stage.losses:
            keep = options.hidden_layers or tuple(range(len(backbone.layers)))
        needs_teacher = any(name != ATTENTION_KL for name in stage.losses)
        teacher = backbone.teach(rows.ids, keep) if needs_teacher else None
        with backbone.switch.enabled(True):  # the backward pass may recompute layers
            student = backbone.run(rows.ids, keep)
            positions = options.batch_size * rows.ids.shape[1]
            extra_terms = {name: value / positions for name, value in stage.extra_terms().items()}
            lesson = Lesson(
                teacher or student,
                student,
                rows.counted,
                positions,
                options.long_context,
                extra_terms,
            )
            term_values = terms(lesson, backbone.head, stage.losses)
            total(term_values, stage.losses).backward()
        return term_values.detach()
