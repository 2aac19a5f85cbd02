"""The frame of every training of new heads: read, estimate, train, evaluate, write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.progress import Progress, SilentProgress
from specbuild.builder.training.corpus import Rows
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.training.heads.backbone import Backbone
from specbuild.builder.training.heads.estimate import TrainingEstimate, estimate_training
from specbuild.builder.training.heads.options import HeadOptions
from specbuild.builder.training.heads.output import HeadReport, write_head_report
from specbuild.builder.training.heads.run import HeadRun, leave, restore, train, trial
from specbuild.builder.training.heads.stage import Schedule
from specbuild.builder.training.heads.workers import Workers
from specbuild.builder.training.run_state import INITIAL_FILE, RunFolder
from specbuild.builder.training.training_text import read_training_text
from specbuild.runtime.errors import SpecbuildError

# These options do not change a run's result, so they may differ when it resumes.
FREE_OPTIONS = ("output", "save_every", "resume", "finish", "time_limit_s")
UNREPORTED_OPTIONS = (*FREE_OPTIONS, "model", "texts", "held_out", "initial", "device")


Measure = Callable[..., float]


@dataclass(frozen=True)
class Judge:
    """Measures perplexities by name, before and after training.

    Both functions get one that measures held-out text with (``heads=True``) or without new heads.
    """

    before: Callable[[Measure], dict[str, float]]
    after: Callable[[Measure], dict[str, float]]


def require_hidden_layers(options: HeadOptions, target: TargetCheckpoint) -> None:
    """Raise SpecbuildError if ``--hidden-layers`` has a layer that the model lacks."""
    count = len(target.geometry.layer_types)
    for layer in options.hidden_layers or ():
        if not 0 <= layer < count:
            raise SpecbuildError(
                f"--hidden-layers: the model has no layer {layer}, expected 0 to {count - 1}"
            )


@dataclass(frozen=True)
class Session:
    """One run's folder, processes and progress."""

    options: HeadOptions
    folder: RunFolder
    workers: Workers
    progress: Progress

    @classmethod
    @contextmanager
    def open(cls, options: HeadOptions, progress: Progress) -> Iterator[Session]:
        """Join the other processes and open the run's folder; a refused run leaves no files."""
        workers = Workers.joined(options.device)
        # Processes communicate in every layer of every pass, so all must run the same number.
        if options.batch_size % workers.count:
            raise SpecbuildError(
                f"train: --batch-size {options.batch_size} is not a multiple of the "
                f"{workers.count} processes; use a multiple"
            )
        values = {k: v for k, v in asdict(options).items() if k not in FREE_OPTIONS}
        values["processes"] = workers.count  # the rounding of sums depends on it
        text = json.dumps(values, default=str, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        if workers.leads:
            folder = RunFolder.open(options.output, fingerprint=fingerprint, resume=options.resume)
        workers.wait()
        if not workers.leads:
            folder = RunFolder.of(options.output)
        try:
            yield cls(options, folder, workers, progress if workers.leads else SilentProgress())
        except SpecbuildError:
            if workers.leads:
                folder.remove_unused(INITIAL_FILE)
            raise
        finally:
            if workers.leads:
                folder.remove_unused()
            workers.leave()

    def backbone(self, *, checkpointing: bool) -> Backbone:
        """Return the frozen model on this process's device."""
        options = self.options
        model = load_target(options.model, device=self.workers.device, dtype=options.dtype)
        return Backbone(model, checkpointing=checkpointing)

    def trained(
        self,
        backbone: Backbone,
        schedule: Schedule,
        judge: Judge,
        write: Callable[[Path], None],
        started_s: float,
    ) -> HeadReport:
        """Estimate, train and evaluate; publish the files that ``write`` puts in a folder."""
        options, workers = self.options, self.workers
        text, held_out = read_training_text(self.options, backbone.model)
        parameters = [p for stage in schedule.stages for p in stage.heads.parameters()]
        workers.shard(backbone.layers, parameters)
        run = HeadRun(options, backbone, schedule, text, workers, self.progress)
        size = options.micro_batch_size or options.batch_size

        def measure(*, heads: bool) -> float:
            return perplexity(backbone, held_out, heads=heads, batch_size=size)

        perplexities = judge.before(measure) if len(held_out.ids) else {}
        estimate = self._estimate(run, parameters)
        restore(run, self.folder.load())
        finished = train(run, self.folder, started_s)
        leave(run)
        if finished and perplexities:
            perplexities |= judge.after(measure)
        report = HeadReport(
            finished=finished,
            steps=run.step,
            plan=estimate,
            training_tokens=len(text.stream.ids),
            held_out_tokens=held_out.ids[:, 1:].size,
            perplexities=perplexities,
            losses=tuple(run.points),
            options={k: v for k, v in asdict(options).items() if k not in UNREPORTED_OPTIONS},
        )
        if finished and workers.leads:

            def write_all(folder: Path) -> None:
                write(folder)
                write_head_report(folder, report)

            self.folder.publish(write_all, options.output)
            for name, value in perplexities.items():
                self.progress.note(f"perplexity, {name}: {value:.4f}")
            self.progress.note(
                f"copy the tensors in {options.output} to the model's directory to build with them"
            )
        return report

    def _estimate(self, run: HeadRun, parameters: list[nn.Parameter]) -> TrainingEstimate:
        options = self.options
        steps = run.schedule.steps
        estimate = estimate_training(
            run.backbone.model,
            parameters,
            processes=self.workers.count,
            tokens=steps * options.batch_size * options.sequence_length,
            steps=steps,
            trial=trial(run),
        )
        for line in estimate.lines():
            self.progress.note(line)
        return estimate


@torch.no_grad()
def perplexity(backbone: Backbone, rows: Rows, *, heads: bool, batch_size: int) -> float:
    """Return ``exp`` of the mean loss of the rows' next tokens; rows are independent."""
    device = str(backbone.head.weight.device)
    losses = []
    for start in range(0, len(rows.ids), batch_size):
        ids = rows.batch(slice(start, start + batch_size), device).ids
        with backbone.switch.enabled(heads):
            states = backbone.run(ids).last[:, :-1]
        for row, next_ids in zip(states, ids[:, 1:], strict=True):
            logits = backbone.head(row).float()
            losses.append(F.cross_entropy(logits, next_ids, reduction="none").double())
    return float(torch.cat(losses).mean().exp())
