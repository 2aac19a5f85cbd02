"""Synthetic models with a given entropy, and drafts at a given distance, measured by references."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from synthetic_models import tiny

from specbuild.builder.families.eagle3.reference import load_reference_draft
from specbuild.builder.progress import SilentProgress
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.shards import write_json, write_shards
from specbuild.builder.synth.synth import write_checkpoints
from specbuild.builder.training.frozen_target import load_target
from specbuild.cli.main import main
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 120
LEVELS = 3


def spread_model(entropy: float, tv: float | None = None, **changes: object) -> SynthModel:
    return tiny(1.0, target_entropy=entropy, draft_tv=tv, **changes)


def text_ids(model: SynthModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return model.rules.cycle[torch.randint(len(model.rules.cycle), (LENGTH,), generator=generator)]


def next_token(target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the distribution after each of ``ids`` [n], float64 [n, V]."""
    with torch.no_grad():
        return target(ids[None]).logits[0].double().softmax(dim=-1)


@pytest.fixture(scope="module", params=[(1.0, 0.25), (2.0, 0.3)])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """Entropy and distances of the files, by transformers and by the draft in plain torch."""
    entropy, tv = request.param
    model = spread_model(entropy, tv)
    path = tmp_path_factory.mktemp("spread") / "checkpoints"
    write_checkpoints(model, path, SilentProgress(), force=False)
    target, ids = load_target(path / "target"), text_ids(model)
    draft = load_reference_draft(
        path / "draft", embedding=target.model.embed_tokens.weight, head=target.lm_head.weight
    )
    with torch.no_grad():
        output = target(ids[None], output_hidden_states=True)
        p = output.logits[0].double().softmax(dim=-1)
        layers = model.draft.aux_layers  # hidden_states has the embedding first
        aux = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], dim=-1)
        distances = []
        rows = LENGTH - 1
        hidden = draft.fuse(aux)[:rows]
        for root in range(0, rows - LEVELS, 8):
            # The chain of one position: rows up to it, then a row for each further level.
            tokens, states = ids[1 : root + 2], hidden[: root + 1]
            for level in range(LEVELS):
                result = draft.run(tokens, states, torch.arange(len(tokens)))
                q = torch.zeros_like(p[0])
                q[draft.target_ids] = result.logits[-1].double().softmax(dim=-1)
                distances.append(float((q - p[root + level + 1]).abs().sum()) / 2)
                tokens = torch.cat([tokens, ids[root + level + 2 :][:1]])
                states = torch.cat([states, result.recurrence[-1:]])
    following = model.rules.after()[ids]
    return {
        "requested entropy": entropy,
        "entropy": -float(torch.special.xlogy(p, p).sum(dim=-1).mean()),
        "requested tv": tv,
        "tv": sum(distances) / len(distances),
        "greedy": float((p.argmax(dim=-1) == following).double().mean()),
    }


def test_the_target_has_the_requested_entropy(measured: dict[str, float]) -> None:
    assert measured["entropy"] == pytest.approx(measured["requested entropy"], rel=0.06)


def test_the_draft_has_the_requested_distance(measured: dict[str, float]) -> None:
    assert measured["tv"] == pytest.approx(measured["requested tv"], rel=0.15)


def test_greedy_decoding_follows_the_permutation(measured: dict[str, float]) -> None:
    assert measured["greedy"] > 0.85


def test_repeated_layers_do_not_change_the_entropy(tmp_path: Path) -> None:
    model = tiny(None, target_entropy=2.0, unique_layers=1)
    g, count = model.target, 6
    model.target = replace(
        g,
        layers=count * g.layers,
        layer_types=count * g.layer_types,
        layer_feed_forwards=count * g.layer_feed_forwards,
    )
    tensors = {name: model.target_tensors[model.origin(name)] for name in model.target_tensors}
    write_json(tmp_path / "config.json", model.config_fields)
    write_shards(tmp_path, tensors, SilentProgress())
    p = next_token(load_target(tmp_path), text_ids(model))
    assert -float(torch.special.xlogy(p, p).sum(dim=-1).mean()) == pytest.approx(2.0, rel=0.03)
    outside = torch.ones(g.vocab, dtype=torch.bool)
    outside[model.rules.cycle] = False
    assert float(p[:, outside].sum(dim=-1).max()) < 1e-3


def test_groups_of_tokens_form_a_cycle() -> None:
    model = spread_model(1.5, 0.4)
    spread, rules = model.spread, model.rules
    assert spread is not None and model.draft is not None
    after = rules.after()[rules.cycle]
    following = {}
    for now, then in zip(
        spread.group[rules.cycle].tolist(), spread.group[after].tolist(), strict=True
    ):
        assert following.setdefault(now, then) == then
    size = len(spread.target)
    assert len(following) * size == len(rules.cycle)
    others = torch.ones(len(spread.group), dtype=torch.bool)
    others[rules.cycle] = False
    outside = spread.group[others]
    assert len(outside.unique()) == len(outside) and outside.min() >= len(following)
    p = spread.target.double().softmax(dim=0)
    assert -float((p * p.log()).sum()) == pytest.approx(1.5, abs=1e-3)


def test_rejects_impossible_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for entropy in (0.0, math.log(64)):
        with pytest.raises(SpecbuildError, match="--target-entropy"):
            spread_model(entropy).spread  # noqa: B018
    with pytest.raises(SpecbuildError, match="has a distance from"):
        spread_model(1.0, 0.001).spread  # noqa: B018
    with pytest.raises(SpecbuildError, match="--draft-tv needs --target-entropy"):
        tiny(1.0, draft_tv=0.2)
    with pytest.raises(SpecbuildError, match="is for eagle3 drafts"):
        spread_model(1.0, draft_kind="dflash")
    words = [
        "synth",
        "--geometry",
        "tiny",
        "--target-entropy",
        "1",
        "--output",
        str(tmp_path / "o"),
    ]
    assert main([*words, "--draft-tv", "0.2"]) == 2
    assert "needs a draft; add --draft" in capsys.readouterr().err
    assert main([*words, "--draft", "--acceptance", "0.5"]) == 2
    assert "give --draft-tv" in capsys.readouterr().err
