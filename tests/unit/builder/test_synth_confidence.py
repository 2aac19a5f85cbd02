"""Synthetic drafts with higher confidence for right tokens, measured in plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_models import successors, tiny

from specbuild.builder.families.eagle3.reference import load_reference_draft
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.synth import write_checkpoints
from specbuild.builder.training.frozen_target import load_target
from specbuild.cli.main import main
from specbuild.runtime.errors import SpecbuildError

LENGTH = 384


def area(right: np.ndarray, wrong: np.ndarray) -> float:
    """Return the share of pairs in which the right value is higher; equal values count half."""
    above = (right[:, None] > wrong).mean()
    return float(above + 0.5 * (right[:, None] == wrong).mean())


@pytest.mark.parametrize("auc", [0.5, 0.8, 0.9])
def test_the_largest_probability_has_the_requested_auc(tmp_path: Path, auc: float) -> None:
    model = tiny(0.6, confidence_auc=auc)
    write_checkpoints(model, tmp_path / "checkpoints", SilentProgress(), force=False)
    target = load_target(tmp_path / "checkpoints" / "target")
    draft = load_reference_draft(
        tmp_path / "checkpoints" / "draft",
        embedding=target.model.embed_tokens.weight,
        head=target.lm_head.weight,
    )
    cycle = model.rules.cycle
    chosen = torch.randperm(len(cycle), generator=torch.Generator().manual_seed(3))[:LENGTH]
    ids = cycle[chosen]
    with torch.no_grad():
        output = target(ids[None], output_hidden_states=True)
        layers = model.draft.aux_layers  # hidden_states has the embedding first
        aux = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], dim=-1)
        # A row of the draft has the hidden states of a position and the next token.
        rows = LENGTH - 1
        result = draft.run(ids[1:], draft.fuse(aux)[:rows], torch.arange(rows))
        q = result.logits.double().softmax(dim=-1)
    following, says = successors(model)
    drafted = draft.target_ids[q.argmax(dim=-1)].tolist()
    tokens = ids[1:].tolist()
    assert np.mean([says[t] == d for t, d in zip(tokens, drafted, strict=True)]) > 0.97
    right = np.array([following[t] == d for t, d in zip(tokens, drafted, strict=True)])
    sure = q.max(dim=-1).values.numpy()
    assert right.mean() == pytest.approx(0.6, abs=0.08)
    assert area(sure[right], sure[~right]) == pytest.approx(auc, abs=0.07)


def test_confidence_changes_the_probabilities_only() -> None:
    plain, surer = tiny(0.6), tiny(0.6, confidence_auc=0.8)
    assert successors(plain) == successors(surer)
    assert plain.prompts() == surer.prompts()
    assert plain.draft_rules.confidence is None and surer.draft_rules.confidence is not None


def test_rejects_drafts_without_confidence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecbuildError, match="sometimes right"):
        tiny(1.0, confidence_auc=0.8)
    with pytest.raises(SpecbuildError, match="sometimes right"):
        tiny(None, confidence_auc=0.8)
    with pytest.raises(SpecbuildError, match="eagle3 drafts without --target-entropy"):
        tiny(1.0, confidence_auc=0.8, target_entropy=1.0)
    with pytest.raises(SpecbuildError, match="eagle3 drafts"):
        tiny(0.6, confidence_auc=0.8, draft_kind="dflash")
    words = ["synth", "--geometry", "tiny", "--draft", "--output", "x", "--confidence-auc", "0.4"]
    assert main(words) == 2
    assert "0.5" in capsys.readouterr().err
