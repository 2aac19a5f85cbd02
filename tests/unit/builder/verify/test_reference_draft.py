"""The reference draft against transformers' Llama, which it equals in special cases."""

from __future__ import annotations

import pytest
import torch
from checkpoints import write_draft
from transformers import LlamaConfig, LlamaModel

from specbuild.builder.families.eagle3.reference import load_reference_draft
from specbuild.runtime.errors import SpecbuildError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
EMBEDDING = torch.randn(256, 64, generator=torch.Generator().manual_seed(5))
HEAD = torch.randn(256, 64, generator=torch.Generator().manual_seed(6))


def llama_of(tensors, rope) -> LlamaModel:
    """Return a one-layer Llama that equals a draft whose attention reads the hidden state."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        vocab_size=8,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"} | rope,
        attn_implementation="eager",
    )
    state = {"embed_tokens.weight": torch.zeros(8, 64), "norm.weight": tensors["norm.weight"]}
    for name, value in tensors.items():
        if not name.startswith("midlayer.") or name == "midlayer.input_layernorm.weight":
            continue
        reads_both = value.shape[-1] == 128 and "o_proj" not in name
        renamed = name.replace("midlayer.", "layers.0.").replace("hidden_norm", "input_layernorm")
        state[renamed] = value[:, 64:] if reads_both else value
    state = {name: value.float() for name, value in state.items()}
    model = LlamaModel(config).eval()
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("rope", [{}, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("width", ["hidden", "embedding_and_hidden"])
def test_a_draft_without_an_embedding_half_equals_a_llama_layer(tmp_path, rope, width):
    tensors = write_draft(tmp_path, input_width=width, rope_scaling=rope or None)
    embedding = EMBEDDING if width == "hidden" else torch.zeros(256, 64)
    draft = load_reference_draft(tmp_path, embedding=embedding, head=HEAD)
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    states = draft.run(torch.arange(20), hidden, torch.arange(20))
    with torch.no_grad():
        expected = llama_of(tensors, rope)(inputs_embeds=hidden[None]).last_hidden_state[0]
    torch.testing.assert_close(states.pre_head, expected, rtol=1e-4, atol=1e-5)
    head = tensors["lm_head.weight"].float()
    torch.testing.assert_close(states.logits, expected @ head.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.recurrence, hidden + states.attention + states.ffn)


def test_embedding_half_comes_first(tmp_path):
    """Exchange the halves of projections and norms, and the inputs."""
    write_draft(tmp_path)
    draft = load_reference_draft(tmp_path, embedding=EMBEDDING, head=HEAD)
    ids, hidden = torch.arange(10, 20), torch.randn(10, 64)
    before = draft.run(ids, hidden, torch.arange(10)).attention
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"midlayer.self_attn.{name}.weight"
        draft.weights[key] = draft.weights[key].roll(64, dims=1)
    norms = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
    first, second = (draft.weights[name] for name in norms)
    draft.weights |= {norms[0]: second, norms[1]: first}
    draft.embedding = torch.zeros(256, 64).index_copy(0, ids, hidden)
    after = draft.run(ids, EMBEDDING[ids], torch.arange(10)).attention
    torch.testing.assert_close(after, before)


def test_a_row_attends_to_earlier_rows_within_its_window_only(tmp_path):
    write_draft(tmp_path, sliding_window=3)
    draft = load_reference_draft(tmp_path, embedding=EMBEDDING, head=HEAD)
    hidden, ids = torch.randn(8, 64), torch.arange(8)
    before = draft.run(ids, hidden, torch.arange(8)).logits
    hidden[4] += 1.0
    changed = (draft.run(ids, hidden, torch.arange(8)).logits != before).any(dim=-1)
    assert changed.tolist() == [False] * 4 + [True] * 3 + [False]


def test_shared_head_and_vocabulary(tmp_path):
    write_draft(tmp_path / "shared", draft_vocab=None)
    shared = load_reference_draft(tmp_path / "shared", embedding=EMBEDDING, head=HEAD)
    assert torch.equal(shared.target_ids, torch.arange(256))
    states = shared.run(torch.arange(3), torch.randn(3, 64), torch.arange(3))
    torch.testing.assert_close(states.logits, states.pre_head @ HEAD.T)
    tensors = write_draft(tmp_path / "own")
    own = load_reference_draft(tmp_path / "own", embedding=EMBEDDING, head=HEAD)
    assert torch.equal(own.target_ids, torch.arange(128) + tensors["d2t"])


def test_following_a_path_uses_its_own_outputs(tmp_path):
    write_draft(tmp_path, norm_output=True)
    draft = load_reference_draft(tmp_path, embedding=EMBEDDING, head=HEAD)
    aux_hidden, ids = torch.randn(4, 192), torch.tensor([3, 1, 4, 1])
    states = draft.follow(aux_hidden, ids, torch.tensor([5, 9]))
    assert len(states.logits) == 3
    hidden = draft.fuse(aux_hidden)
    for token, level in ((5, 1), (9, 2)):
        last = draft.run(ids, hidden, torch.arange(len(ids)))
        torch.testing.assert_close(states.logits[level - 1], last.logits[-1])
        hidden = torch.cat([hidden, last.pre_head[-1:]])
        ids = torch.cat([ids, torch.tensor([token])])
    last = draft.run(ids, hidden, torch.arange(len(ids)))
    torch.testing.assert_close(states.logits[2], last.logits[-1])


def test_rejects_a_folder_without_a_draft(tmp_path):
    with pytest.raises(SpecbuildError, match="no draft checkpoint"):
        load_reference_draft(tmp_path, embedding=EMBEDDING, head=HEAD)
