"""Attention, losses, latents and indexers of head training, against transformers and the ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_target
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_files import write_latents
from torch.nn import functional as F

from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.training.heads import indexers
from specbuild.builder.training.heads.attention import AttentionInputs, attend
from specbuild.builder.training.heads.backbone import Backbone, States
from specbuild.builder.training.heads.indexers import (
    IndexerHeads,
    IndexerShape,
    SparsePattern,
    choose,
)
from specbuild.builder.training.heads.latents import LatentHeads
from specbuild.builder.training.heads.losses import Lesson, terms, total
from specbuild.builder.training.heads.options import IndexerTraining, LatentTraining
from specbuild.builder.verify.reference_target import ReferenceTarget
from specbuild.plugins_cuda.dsa_indexer.op import reference as indexer_reference
from specbuild.runtime.errors import SpecbuildError

LENGTH = 48
NEAR = {"atol": 3e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target"
    write_target(path)
    return path


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def backbone(model: Path, *, checkpointing: bool = False) -> Backbone:
    return Backbone(load_target(model), checkpointing=checkpointing)


def by_transformers(reference: ReferenceTarget, ids: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits of all rows."""
    return torch.stack([torch.from_numpy(reference.run(row.numpy()).logits) for row in ids])


@torch.no_grad()
def logits(one: Backbone, ids: torch.Tensor, *, heads: bool) -> torch.Tensor:
    with one.switch.enabled(heads):
        return one.head(one.run(ids).last)


def test_the_frozen_backbone_equals_transformers(model: Path, ids: torch.Tensor) -> None:
    """Compare sinks, windows in blocks (8 divides 48) and other parts with the eager attention."""
    result = logits(backbone(model), ids, heads=False)
    torch.testing.assert_close(result, by_transformers(ReferenceTarget(model), ids), **NEAR)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), window=st.integers(0, 12), groups=st.integers(1, 3),
    dim=st.sampled_from([2, 8, 12]), seed=st.integers(0, 9),
)  # fmt: skip
def test_attention_is_a_softmax_over_visible_keys(
    rows: int, window: int, groups: int, dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 2 * groups, rows, dim, generator=generator)
    k, v = torch.randn(2, 2, 2, rows, dim, generator=generator)
    sinks = 3 * torch.randn(2 * groups, generator=generator)
    result = attend(AttentionInputs(q, k, v, sinks, 0.3, window))
    for head in range(2 * groups):
        for t in range(rows):
            first = max(0, t + 1 - window) if window else 0
            seen = slice(first, t + 1)
            scores = 0.3 * q[:, head, t, None] @ k[:, head // groups, seen].mT
            joined = torch.cat([scores[:, 0], sinks[head].expand(2, 1)], dim=1).softmax(1)
            expected = joined[:, None, :-1] @ v[:, head // groups, seen]
            torch.testing.assert_close(result[:, head, t], expected[:, 0], atol=1e-5, rtol=1e-5)


def test_latents_equal_the_definition_of_their_file(
    model: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    """The file includes LoRA and an output projection; a written file gives the same results."""
    tensors = write_latents(tmp_path, {0: 12, 3: 20})
    name = "model.layers.3.self_attn.o_proj.weight"
    plain = read_target(model, strict=True, mla=False).tensors
    generator = torch.Generator().manual_seed(5)
    tensors[name] = plain[name].load().float() + 0.05 * torch.randn(64, 64, generator=generator)
    one = backbone(model)
    before = logits(one, ids, heads=False)
    heads = LatentHeads(
        one, tensors, lambda i: plain[f"model.layers.{i}.self_attn.o_proj.weight"].load(),
        lora_rank=4, seed=0,
    )  # fmt: skip
    for adaptation in heads.outputs.values():
        torch.nn.init.normal_(adaptation.lora_b, std=0.05, generator=generator)
    assert sum(p.numel() for p in heads.parameters()) == 32 * (64 + 32 + 32) + 2 * 4 * (64 + 64)
    assert torch.equal(logits(one, ids, heads=False), before)
    after = logits(one, ids, heads=True)
    assert (after - before).abs().max() > 0.1

    class Loaded:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.load = lambda: tensor

    reference = ReferenceTarget(model)
    stored = heads.tensors(torch.float32)
    assert sorted(n.split(".")[2] for n in stored if n.endswith("o_proj.weight")) == ["0", "3"]
    reference.use_latents((12, 0, 0, 20), {n: Loaded(t) for n, t in stored.items()})
    torch.testing.assert_close(after, by_transformers(reference, ids), **NEAR)


def test_checkpointing_changes_no_gradient(model: Path, ids: torch.Tensor, tmp_path: Path) -> None:
    """Check latents with logits and indexers with attention, together and in sparse attention."""
    tensors = write_latents(tmp_path, {0: 12, 1: 20})
    gradients = []
    for checkpointing in (False, True):
        one = backbone(model, checkpointing=checkpointing)
        latents = LatentHeads(one, tensors, lambda _: torch.empty(0), lora_rank=0, seed=0)
        pattern = SparsePattern(6, 1, 4, "sparse", learns=True)
        indexers = IndexerHeads(one, (1, 3), IndexerShape(2, 8), pattern, seed=0)
        teacher = one.teach(ids)
        with one.switch.enabled(True):
            student = one.run(ids)
            beside = {"attention-kl": indexers.divergence() / ids.numel()}
            counted = torch.ones_like(ids, dtype=torch.bool)
            weights = {"logits-kl": 1.0, "attention-kl": 0.5}
            lesson = Lesson(teacher, student, counted, ids.numel(), 0, beside)
            total(terms(lesson, one.head, weights), weights).backward()
        heads = [*latents.parameters(), *indexers.parameters()]
        gradients.append(torch.cat([p.grad.flatten() for p in heads]))
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in heads)
        assert not any(p.requires_grad for p in one.layers[2].parameters())
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


def test_loss_terms_equal_their_definitions() -> None:
    """Compare with a second implementation in fp64, and with the sum over two half batches."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False)
    expected, result = torch.randn(2, 4, 6, 8, generator=generator)
    counted = torch.rand(4, 6, generator=generator) > 0.3
    weights = {"logits-kl": 1.0, "logits-mse": 2.0, "long-logits-l2": 3.0, "hidden-mse": 4.0}

    def lesson(rows: slice) -> Lesson:
        teacher = States(expected[rows], {1: expected[rows], 3: result[rows]})
        student = States(result[rows], {1: result[rows], 3: result[rows]})
        return Lesson(teacher, student, counted[rows], 24, 4)

    actual = terms(lesson(slice(None)), head, weights)
    a, b = (x.double() @ head.weight.double().T for x in (expected, result))
    kl = (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1)
    square = (a - b).square().mean(-1)
    late = counted & (torch.arange(6) >= 4)
    hidden = (expected - result).square().sum(-1) / expected.square().sum(-1) / 2
    masked = [(kl, counted), (square, counted), (square, late), (hidden, counted)]
    by_hand = torch.stack([(value * mask).sum().double() for value, mask in masked]) / 24
    torch.testing.assert_close(actual.double(), by_hand, atol=1e-6, rtol=1e-5)
    halves = [terms(lesson(rows), head, weights) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(halves), actual)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 24), top_k=st.integers(1, 26), first=st.integers(0, 4),
    recent=st.integers(1, 5), heads=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_training_selects_the_tokens_of_the_op(
    rows: int, top_k: int, first: int, recent: int, heads: int, seed: int
) -> None:
    """A prefill with ties in DsaIndexer's reference attends to the same keys."""
    from specbuild.builder.training.heads.indexers import _always_selected
    from specbuild.plugins_cuda.dsa_indexer.reference import indexer_scores

    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-1, 2, (rows, heads, 2), generator=generator).float()
    keys = torch.randint(-1, 2, (rows, 2), generator=generator).float()
    weights = torch.randint(0, 3, (rows, heads), generator=generator).float()
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    always_selected = _always_selected(seen, SparsePattern(top_k, first, recent))
    chosen, _ = choose(indexer_scores(q, keys, weights), seen, always_selected, top_k)
    page = 8
    pages = -(-rows // page)
    pool = torch.full((pages + 1, 1, page, 2), float("nan"))
    pool[1:].view(-1, 2)[:rows] = keys
    int32 = torch.int32
    lists = indexer_reference(
        q, weights, pool, torch.arange(1, pages + 1, dtype=int32).view(1, 1, -1),
        torch.tensor([0, rows], dtype=int32), torch.arange(rows, dtype=int32),
        torch.tensor([rows], dtype=int32), torch.zeros(rows, 1, dtype=int32),
        torch.arange(rows, dtype=int32), torch.tensor([top_k], dtype=int32),
        top_k=top_k, threshold=0, first_tokens=first, recent_tokens=recent,
    )[:, 0]  # fmt: skip
    for row, mine in zip(lists, chosen, strict=True):
        assert row[row >= 0].tolist() == mine.nonzero().flatten().tolist()


def test_loss_and_selection_of_an_indexer(
    model: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the loss explicitly.

    Selecting all tokens is plain attention; relaxed selection has gradients.
    """
    monkeypatch.setattr("specbuild.builder.training.heads.indexers._ROWS", 20)
    one = backbone(model)
    plain = logits(one, ids, heads=False)
    pattern = SparsePattern(LENGTH, 1, 4, "whole", learns=True)
    indexers = IndexerHeads(one, (3,), IndexerShape(2, 8), pattern, seed=0)
    seen: dict[str, torch.Tensor] = {}
    attention = one.layers[3].self_attn
    attention.head.register_forward_pre_hook(lambda _m, args: seen.update(scene=args[0]))
    attention.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.update(x=kwargs["hidden_states"]), with_kwargs=True
    )
    torch.testing.assert_close(logits(one, ids, heads=True), plain)
    inputs = seen["scene"]
    k = inputs.k.repeat_interleave(2, dim=1)
    sinks = inputs.sinks.view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)
    joined = torch.cat([inputs.q @ k.mT * inputs.scale, sinks], -1)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    joined[..., :-1].masked_fill_(~causal, -torch.inf)
    p = joined.double().softmax(-1)[..., :-1].mean(1)
    layer = indexers.layers["3"]
    queries = (seen["x"] @ layer.dsa_W_q).view(2, LENGTH, 2, 8)
    products = torch.einsum("bthd,bsd->bths", queries, seen["x"] @ layer.dsa_W_k).relu()
    scores = (products * (seen["x"] @ layer.dsa_W_h)[..., None]).sum(2).double()
    by_hand = 0.0
    for b in range(2):
        for t in range(5, LENGTH):
            free = slice(1, t - 3)  # neither the first token nor the last four
            mass = p[b, t, free].sum()
            inner = scores[b, t, free].log_softmax(0)
            by_hand += (mass * F.kl_div(inner, p[b, t, free] / mass, reduction="sum")).item()
    assert float(indexers.divergence()) == pytest.approx(by_hand, rel=1e-4)
    pattern.learns = False
    for mode in ("sparse", "relaxed"):
        pattern.mode, pattern.top_k = mode, LENGTH
        torch.testing.assert_close(logits(one, ids, heads=True), plain, atol=1e-4, rtol=1e-4)
        pattern.top_k = 6
        assert (logits(one, ids, heads=True) - plain).abs().max() > 1e-3
    with one.switch.enabled(True):
        one.run(ids).last.square().mean().backward()
    assert all(p.grad.abs().max() > 0 for p in indexers.parameters())


def indexer_options(**changes: Any) -> IndexerTraining:
    values = {"sequence_length": 32, "top_k": (4,), "first_tokens": 1, "recent_tokens": 3}
    return IndexerTraining(
        model=Path("m"), texts=(Path("t"),), output=Path("o"), **(values | changes)
    )


def test_a_long_context_begins_within_the_sequence() -> None:
    options = {"losses": (("long-logits-l2", 1.0),), "sequence_length": 24, "rank": 8}
    arguments = {"model": Path("m"), "texts": (Path("t"),), "output": Path("o"), **options}
    assert LatentTraining(**arguments, long_context=23).long_context == 23
    with pytest.raises(SpecbuildError, match="24 tokens never reach the context of 24"):
        LatentTraining(**arguments, long_context=24)


def test_rejects_top_k_values_that_select_every_token() -> None:
    assert indexer_options(top_k=(4, 40)).top_k == (4, 40)
    assert indexer_options(top_k=(27,)).top_k == (27,)
    with pytest.raises(SpecbuildError, match="--top-k 28: selects all tokens of sequences of 32"):
        indexer_options(top_k=(28,))


def test_joint_losses_are_checked_too() -> None:
    with pytest.raises(SpecbuildError, match="--loss logits-k: expected each term once"):
        indexer_options(joint_losses=(("logits-k", 1.0),))


def test_relaxed_weights_depend_on_selectable_scores_only() -> None:
    """The score of an always selected key has no effect on other keys."""
    inputs = type("Inputs", (), {"visible": lambda _: torch.ones(6, 6, dtype=torch.bool).tril()})()
    pattern = indexers.SparsePattern(2, 1, 1, "relaxed")
    layer = indexers.LayerIndexer(
        4, indexers.IndexerShape(1, 4), pattern, torch.Generator().manual_seed(0)
    )
    x = torch.rand(1, 6, 4, generator=torch.Generator().manual_seed(1))
    joins = []
    for first in (1.0, 50.0):
        scores = torch.arange(36.0).view(1, 6, 6).sin()
        scores[..., 0] = first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(indexers, "indexer_scores", lambda *_, result=scores: result)
            joins.append(layer._attention_bias(x, inputs)[0, 0, 5])
    torch.testing.assert_close(joins[0], joins[1])
    assert joins[0][0] == 0 and (joins[0][1:5] < 0).all()
