"""The migration guide for TensorRT-LLM: it covers all options, and specbuild's options exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

from specbuild.cli.main import command_line

PAGE = Path(__file__).parents[2] / "docs" / "from-tensorrt-llm.md"
COMMANDS = typer.main.get_command(command_line())
# tensorrt_llm/commands/build.py and cli_plugin_args of tensorrt_llm/plugin/plugin.py, 1.x
TRTLLM_BUILD = """
checkpoint_dir model_config build_config model_cls_file model_cls_name output_dir max_batch_size
max_input_len max_seq_len max_decoder_seq_len max_beam_width max_num_tokens opt_num_tokens
max_encoder_input_len max_prompt_embedding_table_size max_multimodal_len kv_cache_type
paged_kv_cache input_timing_cache output_timing_cache profiling_verbosity strip_plan weight_sparsity
weight_streaming fast_build workers log_level enable_debug_output visualize_network dry_run
monitor_memory logits_dtype gather_context_logits gather_generation_logits gather_all_token_logits
lora_dir lora_ckpt_source lora_target_modules max_lora_rank speculative_decoding_mode max_draft_len
bert_attention_plugin gpt_attention_plugin gemm_plugin gemm_swiglu_plugin fp8_rowwise_gemm_plugin
lora_plugin dora_plugin moe_plugin mamba_conv1d_plugin nccl_plugin low_latency_gemm_plugin
low_latency_gemm_swiglu_plugin gemm_allreduce_plugin context_fmha bert_context_fmha_fp32_acc
remove_input_padding tokens_per_block use_paged_context_fmha use_fp8_context_fmha fuse_fp4_quant
multiple_profiles paged_state streamingllm norm_quant_fusion reduce_fusion user_buffer
use_fused_mlp pp_reduce_scatter
"""
OPTION = re.compile(r"--[a-z0-9][\w-]*")


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield the heading of the right column, left cell and right cell of every table row."""
    heading = ""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|"):
            left, right = (cell.strip() for cell in line.strip("|").split("|"))
            if below.startswith("|---"):
                heading = right
            elif not line.startswith("|---"):
                yield heading, left, right


def options_of(*names: str) -> set[str]:
    parameters = [parameter for name in names for parameter in COMMANDS.commands[name].params]
    return {option for parameter in parameters for option in parameter.opts}


def test_every_option_of_trtllm_build_has_a_row() -> None:
    cells = [left if heading == "specbuild" else right for heading, left, right in rows()]
    listed = {option for cell in cells for option in OPTION.findall(cell)}
    assert {f"--{name}" for name in TRTLLM_BUILD.split()} - listed == set()


def test_options_of_specbuild_exist() -> None:
    """Check the right cells of tables, and prose, which have options of `build` and `serve`."""
    text = PAGE.read_text(encoding="utf-8")
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    cells = [right for heading, _, right in rows() if heading == "specbuild"]
    named = {option for part in [prose, *cells] for option in OPTION.findall(part)}
    assert len(named) > 20
    assert named - options_of("build", "serve", "run") == set()


def test_options_named_with_a_command_are_its_own() -> None:
    named = re.findall(r"`(build|run|serve) (--[^`]*)`", PAGE.read_text(encoding="utf-8"))
    assert {name for name, _ in named} == {"build", "run", "serve"}
    for name, words in named:
        assert set(OPTION.findall(words)) <= options_of(name), f"{name} {words}"


def test_options_of_the_server_table_are_those_of_serve() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("\n## `trtllm-serve`\n")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|")[1] for line in section.splitlines() if line[:1] == "|"]
    named = {option for cell in cells for option in OPTION.findall(cell)}
    assert len(named) > 8
    assert named <= options_of("serve")


def test_commands_of_specbuild_exist() -> None:
    named = set(re.findall(r"`(?:\$ )?specbuild (\w+)", PAGE.read_text(encoding="utf-8")))
    assert {"run", "serve", "bench"} <= named
    assert named <= COMMANDS.commands.keys()
