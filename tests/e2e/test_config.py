"""``--config``: one file for build, run and serve, also from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command

from specbuild import EngineConfig, SpeculativeConfig
from specbuild.builder.build import build
from specbuild.builder.options import SpecPvOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.errors import SpecbuildError

CONFIG = """
speculative_config:
  method: eagle3
  enable_target_tree: false
  enable_specpv: true
  specpv_block_size: 16
  specpv_n_retrieval_blocks: 3
  specpv_n_window_blocks: 1
specpv_partial_threshold: 64
enable_mla_kv_compression: false
build:
  model: {target}
  draft: {draft}
  max-seq-len: 128
  kv_memory: 1MiB
run:
  max_new_tokens: 5
  ignore_eos: true
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, text_target: Path, text_draft: Path) -> Path:
    """A configuration file that describes an engine."""
    file = tmp_path_factory.mktemp("config") / "engine.yaml"
    file.write_text(CONFIG.format(target=text_target, draft=text_draft))
    return file


@pytest.fixture(scope="module")
def engine(config: Path) -> Path:
    """The engine of this file, built from Python."""
    output = config.with_name("engine")
    options = EngineConfig.from_yaml(config).of_command("build") | {"output": str(output)}
    resolved = EngineConfig(options).build_options()
    assert resolved.specpv == SpecPvOptions(
        enabled=True, block_size=16, n_retrieval_blocks=3, partial_threshold=64, n_window_blocks=1
    )
    assert (resolved.limits.kv_memory, resolved.drafting.top_k, resolved.no_mla) == (
        1 << 20,
        1,
        True,
    )
    build(resolved, SilentProgress())
    return output


def test_the_manifest_records_the_effective_options(
    command: Command, config: Path, engine: Path, tmp_path: Path
) -> None:
    """The command line builds the same engine; options override the file."""
    output = tmp_path / "engine"
    result = command("build", "--config", config, "--output", output, "--max-seq-len", 96)
    assert result.code == 0, result.err
    built, other = read_manifest(output), read_manifest(engine)
    assert built.options == other.options | {"max_seq_len": 96}
    assert (built.limits.max_seq_len, other.limits.max_seq_len) == (96, 128)
    assert built.specpv == other.specpv and built.limits.draft_top_k == 1
    assert built.options["specpv_n_retrieval_blocks"] == 3


def test_run_reads_its_section_and_validates_the_others(
    command: Command, config: Path, engine: Path, tiny_engine: Path, tmp_path: Path
) -> None:
    result = command("run", engine, "--config", config, "--prompt", "ab", "--json")
    assert result.code == 0, result.err
    assert len(result.records[0]["output_ids"]) == 5
    result = command(
        "run", engine, "--config", config, "--prompt", "ab", "--json", "--max-new-tokens", 3
    )
    assert len(result.records[0]["output_ids"]) == 3
    result = command("run", tiny_engine, "--config", config, "--prompt", "ab")
    assert result.code == 2
    assert "enable_specpv true, the engine was built with false" in result.err
    plain = tmp_path / "plain.yaml"
    plain.write_text("method: none\nmax_new_tokens: 4\n")
    result = command("run", engine, "--config", plain, "--prompt", "ab", "--json")
    assert result.records[0]["stats"]["mean_acceptance_length"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_new_token: 3", "did you mean max_new_tokens?"),
        ("speculative_config: {methd: eagle3}", "did you mean method?"),
        ("speculative_config: {method: medusa}", "one of 'eagle3'"),
        ("enable_specpv: 3", "expected bool"),
        ("enable_specpv: false\nspecpv_block_size: 16", "enable_specpv is false"),
        ("enable_specpv: true\nspeculative_config: {enable_specpv: true}", "stands there twice"),
        ("enable_speculative_decoding: true\nmethod: none", "contradict"),
        ("method: suffix\nenable_suffix_decoding: false", "contradict"),
        ("enable_suffix_decoding: true", "enable_suffix_decoding true, the engine was built"),
        ("suffix_min_token_prob: 0.5", "suffix_min_token_prob 0.5, the engine was built"),
        ("method: suffix", "method suffix, the engine was built with eagle3"),
        ("run: [1]", "keys and values"),
        ("max_new_tokens: many", "--max-new-tokens"),
        ("1: 2", "keys and values"),
    ],
)
def test_reports_an_invalid_file_in_one_line(
    command: Command, tiny_engine: Path, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    result = command("run", tiny_engine, "--config", file, "--prompt", "ab")
    assert result.code == 2, result.out
    assert words in " ".join(result.err.split()), result.err


def test_rejects_latents_that_a_model_lacks_before_the_build(
    command: Command, text_target: Path, tmp_path: Path
) -> None:
    file, output = tmp_path / "latents.yaml", tmp_path / "engine"
    file.write_text("mla_latent_dim: 64\n")
    result = command("build", "--config", file, "--model", text_target, "--output", output)
    assert result.code == 2 and "mla_latent_dim 64, the model has nothing" in result.err
    assert not output.exists()


def test_a_model_with_checked_latents_is_not_replaced(
    command: Command, text_target: Path, tmp_path: Path
) -> None:
    file = tmp_path / "latents.yaml"
    file.write_text("enable_mla_kv_compression: false\n")
    result = command("build", "--config", file, "--model", text_target, "--output", text_target)
    assert result.code == 2
    assert "would replace" in result.err and "--force" not in result.err


def test_suffix_decoding_in_a_file() -> None:
    """With a draft, use a separate key; alone, use the method's. Its numbers enable it too."""
    both = SpeculativeConfig(method="eagle3", enable_suffix_decoding=True, suffix_max_tokens=9)
    assert both.build_options() == {"drafter": "suffix", "suffix_max_tokens": 9}
    assert both.run_options() == {}
    alone = SpeculativeConfig(method="suffix", suffix_cache_max_depth=12)
    assert alone.build_options() == {"drafter": "suffix", "suffix_cache_max_depth": 12}
    assert alone.run_options() == {"drafter": "suffix"}
    assert SpeculativeConfig(suffix_min_token_prob=0.2).host_drafter == "suffix"
    off = SpeculativeConfig(enable_speculative_decoding=False, suffix_max_tokens=9)
    assert off.build_options() == {} and off.run_options() == {"no_spec": True}


def test_rejects_a_config_without_an_output() -> None:
    with pytest.raises(SpecbuildError, match="model is missing"):
        EngineConfig({"output": "x"}).build_options()
    assert SpeculativeConfig(enable_prefix_caching=False).run_options() == {"no_prefix_cache": True}
