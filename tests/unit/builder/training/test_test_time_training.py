"""Test-time training against the draft as it runs in inference: one path at a time."""

from __future__ import annotations

import pytest
import torch

from specbuild.builder.families.eagle3.reference import ReferenceDraft
from specbuild.builder.training.draft_kinds import draft_tensors
from specbuild.builder.training.draft_layers import DraftShape, TokenWeights
from specbuild.builder.training.draft_module import DraftModule
from specbuild.builder.training.frozen_target import TeacherOutputs
from specbuild.builder.training.objective import Batch, Objective
from specbuild.builder.training.vocabulary import choose_vocabulary

TARGET_VOCAB, STEPS, LENGTH = 40, 4, 13


def make_shape(**changes: int) -> DraftShape:
    sizes = {
        "hidden": 16,
        "target_hidden": 16,
        "vocab": 20,
        "inner": 24,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
    }
    return DraftShape(**(sizes | changes), aux_layers=(0, 1, 3), rope_theta=100.0, rms_eps=1e-5)


def make_draft(shape: DraftShape, seed: int = 0) -> DraftModule:
    draft = DraftModule(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if "norm" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(drawn * scale + (1.0 if "norm" in name else 0.0))
            # The reference reads the tensors of the checkpoint.
            parameter.copy_(parameter.bfloat16().float())
    return draft


@pytest.fixture
def draft() -> DraftModule:
    return make_draft(make_shape())


@pytest.fixture
def vocabulary():
    tokens = torch.arange(5, 40, 2).repeat(3).numpy()
    return choose_vocabulary(tokens, target_vocab=TARGET_VOCAB, size=20)


def random_case(seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    batch = Batch(
        ids=torch.randint(0, TARGET_VOCAB, (2, LENGTH), generator=generator),
        counted=torch.rand(2, LENGTH, generator=generator) < 0.8,
    )
    teacher = TeacherOutputs(
        aux_hidden=torch.randn(2, LENGTH, 48, generator=generator),
        logits=3 * torch.randn(2, LENGTH, TARGET_VOCAB, generator=generator),
    )
    return batch, teacher, torch.randn(TARGET_VOCAB, 16, generator=generator)


def make_objective(vocabulary, embedding: torch.Tensor, steps: int = STEPS) -> Objective:
    return Objective(
        ttt_steps=steps,
        decay=0.8,
        target_ids=vocabulary.target_ids,
        in_draft_vocab=vocabulary.t2d,
        token_weights=TokenWeights(embedding, torch.empty(0)),
    )


def reference_config(shape: DraftShape) -> dict:
    return {
        "num_attention_heads": shape.q_heads,
        "hidden_size": shape.hidden,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_eps,
    }


def logits_of(objective, draft, batch, teacher) -> list[torch.Tensor]:
    return [step.logits for step in objective.predict(draft, batch, teacher)]


def test_every_step_and_row_equals_decoding_from_that_row(draft, vocabulary):
    batch, teacher, embedding = random_case()
    objective = make_objective(vocabulary, embedding)
    reference = ReferenceDraft(
        reference_config(draft.shape),
        draft_tensors(draft, vocabulary),
        embedding=embedding,
        head=torch.empty(0),
    )
    with torch.no_grad():
        trained = torch.stack(logits_of(objective, draft, batch, teacher), dim=2)
    rows = LENGTH - STEPS
    assert trained.shape == (2, rows, STEPS, 20)
    for sequence in range(2):
        ids = batch.ids[sequence]
        for t in range(rows):
            # L = t + 1 auxiliary hidden states exist; the last belongs to the root x_{t+1}.
            states = reference.follow(
                teacher.aux_hidden[sequence, : t + 1], ids[1 : t + 2], ids[t + 2 : t + 1 + STEPS]
            )
            torch.testing.assert_close(
                trained[sequence, t], states.logits, rtol=1e-4, atol=1e-4, msg=f"row {t}"
            )


def test_losses_are_masked_cross_entropies_at_the_shifted_targets(draft, vocabulary):
    batch, teacher, embedding = random_case(seed=2)
    objective = make_objective(vocabulary, embedding)
    with torch.no_grad():
        predictions = objective.predict(draft, batch, teacher)
        losses = objective.losses(predictions, batch, teacher)
        logits = [step.logits for step in predictions]
    ids = vocabulary.target_ids.tolist()
    rows, masked = LENGTH - STEPS, 0
    for step in range(STEPS):
        total = 0.0
        for sequence in range(2):
            for t in range(rows):
                u = t + 1 + step  # the target has read x_0 … x_u and predicts x_{u+1}
                right = teacher.logits[sequence, u]
                if int(right.argmax()) not in ids or not batch.counted[sequence, u]:
                    masked += 1
                    continue
                p = torch.softmax(torch.stack([right[i] for i in ids]), 0)
                q = torch.log_softmax(logits[step][sequence, t], 0)
                total -= float((p * q).sum())
        assert float(losses[step]) == pytest.approx(total / (2 * rows), rel=1e-5)
    assert 0 < masked < STEPS * 2 * rows
    expected = sum(0.8**i * float(loss) for i, loss in enumerate(losses))
    assert float(objective.total(losses)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_gradient_of_a_later_step_reaches_the_fused_states_and_every_key(draft, vocabulary, step):
    batch, teacher, embedding = random_case(seed=3)
    aux_hidden = teacher.aux_hidden.requires_grad_()
    objective = make_objective(vocabulary, embedding)
    logits = logits_of(objective, draft, batch, TeacherOutputs(aux_hidden, teacher.logits))
    logits[step][0, 5].sum().backward()
    assert (aux_hidden.grad[0, :6].abs().sum(-1) > 0).all()  # rows s ≤ t
    assert (aux_hidden.grad[0, 6:] == 0).all()
    assert (aux_hidden.grad[1] == 0).all()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_the_vocabulary_has_the_most_frequent_ids_as_offsets():
    tokens = torch.tensor([7] * 5 + [3] * 4 + [9] * 4 + [1] * 2 + [8] * 2).numpy()
    vocabulary = choose_vocabulary(tokens, target_vocab=12, size=4)
    assert vocabulary.target_ids.tolist() == [1, 3, 7, 9]  # of the tied ids 1 and 8, the lower one
    assert (vocabulary.d2t + torch.arange(4)).tolist() == [1, 3, 7, 9]
    assert vocabulary.d2t.dtype == torch.int64
    assert vocabulary.t2d.nonzero().flatten().tolist() == [1, 3, 7, 9]
    assert vocabulary.coverage == pytest.approx(15 / 17)


def test_a_vocabulary_larger_than_the_text_has_unused_ids():
    vocabulary = choose_vocabulary(torch.tensor([5, 5]).numpy(), target_vocab=8, size=3)
    assert vocabulary.target_ids.tolist() == [0, 1, 5]
