"""``retrofit mla`` end to end: exact at full rank, correct reports, named errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_target

from specbuild.builder.build import build
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.retrofit.config import LatentOptions
from specbuild.builder.training.retrofit.mla import retrofit_mla
from specbuild.builder.training.retrofit.streamed_target import StreamedTarget
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.builder.verify.reference_target import ReferenceTarget
from specbuild.cli.main import main
from specbuild.runtime.errors import SpecbuildError

VOCAB = 256


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of few distinct tokens, so that inputs lie in few directions."""
    ids = np.random.default_rng(0).zipf(1.5, 900) % 200 + 3
    path = tmp_path_factory.mktemp("text") / "ids.npy"
    np.save(path, ids)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_target(tmp_path / "target", vocab=VOCAB)
    return tmp_path / "target"


def training_options(model: Path, rank: int, **changes: Any) -> LatentOptions:
    return LatentOptions(model=model, rank=rank, sequence_length=50, **changes)


@pytest.mark.parametrize("experts_format", ["mxfp4", "bf16"])
def test_streamed_layers_equal_transformers(tmp_path: Path, experts_format: str) -> None:
    write_target(tmp_path, experts_format=experts_format)
    target = read_target(tmp_path, strict=True)
    streamed, reference = StreamedTarget(target.geometry, target.tensors), ReferenceTarget(tmp_path)
    ids = torch.randint(3, VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))
    expected = [reference.run(row.numpy()) for row in ids]
    x = streamed.embedded(ids)
    for index in range(target.geometry.layers):
        layer = streamed.layer(index)
        x = layer.forward(x, layer.normed(x), layer.keys_values)
        for row, states in zip(x, expected, strict=True):
            np.testing.assert_allclose(row, states.layers[index], atol=2e-4, rtol=1e-4)
    for row, states, losses in zip(ids, expected, streamed.losses(x, ids), strict=True):
        logits = torch.from_numpy(states.logits[:-1])
        costs = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")
        torch.testing.assert_close(losses, costs, atol=1e-4, rtol=1e-4)


def test_full_rank_changes_nothing(model: Path, text: Path, tmp_path: Path) -> None:
    report = retrofit_mla(training_options(model, 64, calibration=(text,)), SilentProgress())
    assert all(row.rank == 64 for row in report.layers) and len(report.layers) == 4
    errors = [(row.key_error, row.value_error) for row in report.layers]
    assert np.max(errors) < 4 * np.finfo(np.float32).eps
    assert report.perplexity_before is not None
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=1e-5)
    build(
        BuildOptions(model=model, output=tmp_path / "engine", limits=LimitOptions(max_seq_len=64)),
        SilentProgress(),
    )
    ids = np.random.default_rng(1).integers(3, VOCAB, 40)
    with EngineProbe(tmp_path / "engine").sequence(41) as sequence:
        logits = sequence.extend("target", {"token_ids": ids.astype(np.int32)})["logits"]
    original = ReferenceTarget(model).run(ids).logits
    np.testing.assert_allclose(logits, original, atol=2e-4, rtol=1e-4)


def test_the_report_has_the_measured_errors(model: Path, text: Path) -> None:
    """Measure the reported values again on the tensors in the file, with the calibration rows."""
    options = training_options(model, 24, calibration=(text,), evaluation=(text,), layers="1,3")
    report = retrofit_mla(options, SilentProgress())
    target = read_target(model, strict=True)
    assert target.geometry.latent_dims == tuple(
        {row.layer: row.rank for row in report.layers}.get(layer, 0) for layer in range(4)
    )
    assert report.mean_rank == 24 and report.method == "calibrated"
    assert (report.bytes_per_token_before, report.bytes_per_token_after) == (512, 352)
    reference = ReferenceTarget(model)
    inputs = {}
    for row in report.layers:
        attention = reference.model.model.layers[row.layer].self_attn
        attention.register_forward_hook(
            lambda _m, _a, kw, _o, layer=row.layer: inputs.setdefault(layer, []).append(
                kw["hidden_states"][0]
            ),
            with_kwargs=True,
        )
    ids = np.load(text)[:900].reshape(-1, 50)
    before = [reference.run(row).logits for row in ids]
    for row in report.layers:
        x = torch.cat(inputs[row.layer]).double()
        name = f"model.layers.{row.layer}.self_attn."
        for part, weight_error, output_error in (
            ("k", row.key_error, row.key_output_error),
            ("v", row.value_error, row.value_output_error),
        ):
            whole = target.tensors[f"{name}{part}_proj.weight"].load().double().T
            down = target.tensors[f"{name}mla_W_c"].load().double()
            lost = whole - down @ target.tensors[f"{name}mla_W_{part}_lat"].load().double()
            assert weight_error == pytest.approx(float(lost.norm() / whole.norm()), rel=1e-6)
            again = float((x @ lost).norm() / (x @ whole).norm())
            assert output_error == pytest.approx(again, rel=1e-3)
            assert again < weight_error
    reference.use_latents(target.geometry.latent_dims, target.tensors)
    after = [reference.run(row).logits for row in ids]
    for logits, reported in ((before, report.perplexity_before), (after, report.perplexity_after)):
        costs = [
            torch.nn.functional.cross_entropy(torch.from_numpy(rows[:-1]), torch.from_numpy(x[1:]))
            for rows, x in zip(logits, ids, strict=True)
        ]
        assert reported == pytest.approx(float(torch.stack(costs).mean().exp()), rel=1e-3)


def test_without_text_the_result_is_a_plain_svd(model: Path, tmp_path: Path) -> None:
    options = training_options(model, 10, output=tmp_path / "x.safetensors", dtype="bfloat16")
    report = retrofit_mla(options, SilentProgress())
    assert report.method == "svd" and {row.rank for row in report.layers} == {10}
    assert report.perplexity_before is None and report.layers[0].key_output_error is None
    assert read_target(model, strict=True).geometry.latent_dims == ()
    (tmp_path / "x.safetensors").rename(model / "mla_kv.safetensors")
    target = read_target(model, strict=True)
    assert target.geometry.latent_dims == (10, 10, 10, 10)
    assert target.tensors["model.layers.0.self_attn.mla_W_c"].dtype == "BF16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 65}, "--rank 65: .* have rank 64 at most; use 1 to 64"),
        ({"layers": "2-4"}, "--layers 2-4: 2-4 is not within 0-3"),
        ({"layers": "1,x"}, "--layers 1,x: 'x' is not a layer; write 0-11,15"),
        ({"tokens": 50}, "--calibration: 50 tokens .* hidden size of 64"),
        ({"sequence_length": 800}, "--calibration: 0 tokens in whole sequences of 800"),
        ({"evaluation": True, "sequence_length": 1000}, "--evaluation: the text has fewer tokens"),
    ],
)
def test_the_error_names_an_invalid_value(
    model: Path, text: Path, changes: dict[str, Any], message: str
) -> None:
    if changes.get("evaluation"):
        changes = changes | {"evaluation": (text,)}
    options = replace(training_options(model, 8, calibration=(text,)), **changes)
    with pytest.raises(SpecbuildError, match=message):
        retrofit_mla(options, SilentProgress())
    assert not list(model.glob("*mla*"))


def test_an_output_is_replaced_on_request_only(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["retrofit", "mla", "--model", str(model), "--rank", "16", "--calibration", str(text)]
    words += ["--sequence-length", "50"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["file"] == "mla_kv.safetensors" and len(report["layers"]) == 4
    assert main(words) == 2
    assert "exists; use --force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    output = capsys.readouterr().out
    assert "perplexity" in output and "(4.00 times)" in output


def test_a_named_output_is_replaced_on_request_only(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "kept.safetensors"
    output.write_bytes(b"mine")
    with pytest.raises(SpecbuildError, match="exists; use --force"):
        retrofit_mla(training_options(model, 8, output=output), SilentProgress())
    assert output.read_bytes() == b"mine"
    for other in (b"mine", (model / "model.safetensors").read_bytes()):
        output.write_bytes(other)
        with pytest.raises(SpecbuildError, match="is not a file of latents, so --force"):
            retrofit_mla(training_options(model, 8, output=output, force=True), SilentProgress())
        assert output.read_bytes() == other
