"""Reading and packing text, and generating continuations by the target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_target
from transformers import GptOssForCausalLM

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.config import SelfText
from specbuild.builder.training.corpus import Stream, TrainingText, cut_rows, pack, split_documents
from specbuild.builder.training.documents import Document, DocumentReader
from specbuild.builder.training.evaluation import chain_acceptance
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.training.self_text import Generation, generate_text, no_rows, write_rows
from specbuild.runtime.errors import SpecbuildError


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target"
    write_target(path, vocab=300, tokenizer=True, sliding_window=4)
    return path


@pytest.fixture(scope="module")
def model(model_path) -> GptOssForCausalLM:
    return load_target(model_path)


@pytest.fixture
def reader(model_path) -> DocumentReader:
    return DocumentReader(model_path, vocab=300, end_of_text=(0, 2))


def test_directory_is_read_in_order_of_names(reader, tmp_path):
    (tmp_path / "b.py").write_text("def fox")
    (tmp_path / "a.txt").write_text("the lazy dog")
    (tmp_path / "ignored.bin").write_bytes(b"\x80")
    np.save(tmp_path / "c.npy", np.array([5, 6, 0, 7, 8], np.uint16))
    (tmp_path / "d.jsonl").write_text('{"ids": [9, 10, 11], "loss_from": 2}\n\n{"text": "dog"}\n')
    documents = reader.read((tmp_path,))
    tokenizer = reader._tokenizer
    assert [tokenizer.decode(documents[i].ids) for i in (0, 1, 5)] == [
        "the lazy dog",
        "def fox",
        "dog",
    ]
    assert [d.ids.tolist() for d in documents[2:5]] == [[5, 6, 0], [7, 8], [9, 10, 11]]
    assert documents[4].loss_from == 2


def test_lines_of_json_end_at_newlines_only(reader, tmp_path):
    lines = [json.dumps({"text": f"dog{end}fox"}, ensure_ascii=False) for end in "\u2028\x85\u2029"]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    assert len(reader.read((tmp_path,))) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"ids": [1]}\n{"ids": [1, 300]}', "line 2: token id 300"),
        ("a.jsonl", '{"ids": [1, -1]}', "line 1: token id -1"),
        ("a.jsonl", "[1, 2]", "line 1: got no object, expected"),
        ("a.jsonl", '{"id": "a", "prompt": "b"}', "line 1: got the keys id, prompt, expected"),
        ("a.jsonl", '{"ids": [1], "text": "a"}', "exactly one"),
        ("a.jsonl", '{"ids": [true]}', "ids is not a list of token ids"),
        ("a.jsonl", '{"ids": [1], "loss_from": 0}', "loss_from is 0"),
        ("a.jsonl", "{", "line 1: got no JSON"),
        ("a.txt", "", "no text to train on"),
        ("a.bin", "x", "unknown file type, expected"),
    ],
)
def test_reports_invalid_text_in_one_line(reader, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SpecbuildError, match=message):
        reader.read((tmp_path / name,))


def test_rejects_a_missing_path_and_a_missing_tokenizer(tmp_path):
    reader = DocumentReader(tmp_path, vocab=300, end_of_text=(0,))
    with pytest.raises(SpecbuildError, match="no such file or directory"):
        reader.read((tmp_path / "none",))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SpecbuildError, match=r"no tokenizer\.json"):
        reader.read((tmp_path / "a.txt",))


def test_packing_separates_documents_and_masks_prompts():
    stream = pack([Document(np.array([5, 6, 7]), 2), Document(np.array([8, 2]))], (0, 2))
    assert stream.ids.tolist() == [5, 6, 7, 0, 8, 2]
    assert stream.counted.tolist() == [False, True, True, True, True, True]


def test_the_split_assigns_complete_documents():
    documents = [Document(np.full(10, i, np.int32)) for i in range(20)]
    training_documents, held_out = split_documents(documents, fraction=0.25, seed=0)
    assert (len(training_documents), len(held_out)) == (15, 5)
    assert sorted(int(d.ids[0]) for d in training_documents + held_out) == list(range(20))
    [start], [end] = split_documents(
        [Document(np.arange(100, dtype=np.int32), 95)], fraction=0.1, seed=0
    )
    assert (len(start.ids), len(end.ids), end.loss_from) == (90, 10, 5)
    [start], [end] = split_documents([Document(np.arange(3, 27))], fraction=0.02, seed=0)
    assert (len(start.ids), len(end.ids)) == (24, 0)
    assert len(pack([end], (0, 2)).ids) == 0


def test_batches_depend_on_seed_and_step_only():
    stream = Stream(np.arange(1000, dtype=np.int32), np.ones(1000, bool))
    text = TrainingText(stream, no_rows(16), 16, 0)
    one, again, other = (text.batch(step, 8, "cpu") for step in (3, 3, 4))
    assert torch.equal(one.ids, again.ids) and not torch.equal(one.ids, other.ids)
    assert torch.equal(one.ids - one.ids[:, :1], torch.arange(16).expand(8, -1))


def test_rejects_text_shorter_than_a_sequence():
    with pytest.raises(SpecbuildError, match="has 10 training tokens"):
        TrainingText(Stream(np.arange(10), np.ones(10, bool)), no_rows(16), 16, 0)


def test_held_out_rows_are_distributed_over_the_text():
    rows = cut_rows(Stream(np.arange(100), np.ones(100, bool)), 10, 3)
    assert rows.ids[:, 0].tolist() == [0, 40, 90]
    assert cut_rows(Stream(np.arange(5), np.ones(5, bool)), 10, 3).ids.shape == (0, 10)


def test_greedy_continuation_equals_generate_of_transformers(model):
    prompts = torch.randint(3, 300, (5, 7), generator=torch.Generator().manual_seed(0))
    generation = Generation(new_tokens=20, batch_size=2)
    ids, lengths = generate_text(model, prompts, generation, SilentProgress())
    expected = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
    )
    assert torch.equal(ids, expected)
    assert lengths.tolist() == [27] * 5


def test_a_stop_id_ends_a_row(model):
    prompts = torch.randint(3, 300, (4, 7), generator=torch.Generator().manual_seed(1))
    free, _ = generate_text(model, prompts, Generation(new_tokens=12), SilentProgress())
    stop = int(free[0, 10])
    ids, lengths = generate_text(
        model, prompts, Generation(new_tokens=12, stop=(stop,)), SilentProgress()
    )
    for row in range(4):
        ends = (free[row, 7:] == stop).nonzero().flatten()
        length = 7 + int(ends[0]) + 1 if len(ends) else 19
        assert int(lengths[row]) == length
        assert torch.equal(ids[row, :length], free[row, :length])
        assert (ids[row, length:] == stop).all()


def test_sampled_continuation_follows_its_seed(model):
    prompts = torch.randint(3, 300, (4, 7), generator=torch.Generator().manual_seed(1))
    one, again, other = (
        generate_text(
            model, prompts, Generation(new_tokens=12, temperature=1.0, seed=s), SilentProgress()
        )[0]
        for s in (1, 1, 2)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_generated_rows_train_on_the_continuation_only(model):
    stream = Stream(np.arange(3, 203, dtype=np.int32), np.ones(200, bool))
    rows = write_rows(
        model,
        stream,
        SelfText(count=5, prompt_tokens=6),
        length=16,
        stop=(),
        seed=0,
        progress=SilentProgress(),
    )
    assert rows.ids.shape == (5, 16)
    assert (np.diff(rows.ids[:, :6], axis=1) == 1).all()
    assert rows.counted.tolist() == [[False] * 5 + [True] * 10 + [False]] * 5
    # The prediction at position u is the token at u + 1.
    logits = model(torch.from_numpy(rows.ids.astype(np.int64))).logits
    assert np.array_equal(logits.argmax(-1).numpy()[:, 5:15], rows.ids[:, 6:])


def test_chain_acceptance_of_a_row():
    agreed = np.array(
        [[[1, 1, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]]]
    )
    counted = np.ones_like(agreed, bool)
    # row 0 accepts 3 → row 4 accepts 0 → row 5 accepts 1 → beyond the end
    assert chain_acceptance(agreed.astype(bool), counted) == pytest.approx((4 + 1 + 2) / 3)
    counted[:, :4] = False
    assert chain_acceptance(agreed.astype(bool), counted) == pytest.approx((1 + 2) / 2)


def test_jsonl_of_generated_rows_reads_back(reader, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"ids": [3, 4, 5, 6], "loss_from": 3}) + "\n")
    stream = pack(reader.read((file,)), (0,))
    assert stream.counted.tolist() == [False, False, True, True, True]
