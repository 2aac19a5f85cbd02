"""Engines of several ranks, interpreted in lockstep, against one rank that sums K in parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_checkpoints import write_deepseek
from fused_graphs import EXAMPLE_LIMITS
from left_out import slow
from llama_checkpoints import write_llama
from plan_host import PlanHost, fused_engine, lowered_engine, step_name
from rank_host import RankHost
from torch.nn import functional as F

from specbuild.builder.backends.cpu.backend import CPU
from specbuild.builder.backends.cuda.compile.nvrtc import target_of
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter
from specbuild.builder.backends.cuda.plan.plan_reader import read_programs
from specbuild.builder.backends.cuda.plan.plan_writer import program_bytes
from specbuild.builder.backends.cuda.tactics.call_lowering import CallLowering
from specbuild.builder.backends.cuda.tuning.relower import lower_again
from specbuild.builder.engine.writer import json_bytes
from specbuild.builder.options import BuildOptions
from specbuild.plugins_cuda.launches import Lowering
from specbuild.plugins_cuda.linear.packing import unpack_rows
from specbuild.plugins_cuda.moe.op import reference as moe_reference
from specbuild.plugins_cuda.rms_moe.op import router_input
from specbuild.plugins_cuda.rms_moe.packing import (
    unpack_down,
    unpack_down_values,
    unpack_gate_up,
    unpack_gate_up_bias,
    unpack_gate_up_values,
)
from specbuild.runtime.engine_dir.features import stored_keys
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import PEER, RANK, OpCall
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.program_file import read_launches, read_program

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-gpt-oss"
LIMITS = {"max_seq_len": 128, "max_batch_size": 2, "page_size": 16}
TOKENS = 16
# bf16 with 8 bits may exchange two logits that are closer than this.
NEAR_TIE = 0.1
IDS = [3, 5, 7, 9, 11, 4, 6, 8, 10, 12] * 3
CHAIN = DraftShape(1, 3, 3)
TREE = DraftShape(**{name: EXAMPLE_LIMITS[name] for name in DraftShape.__dataclass_fields__})


def nothing(*_: object) -> Lowering:
    """Disable lowering: the interpreter runs op calls, not launches."""
    return Lowering(())


@dataclass(frozen=True)
class Model:
    """A checkpoint: its folder, or a function that writes it."""

    write: Callable[[Path], None] | None = None
    place: Path | None = None


MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 32,
}  # fmt: skip
# Eight query heads and two KV heads, so that 4 and 8 ranks share KV heads.
WIDE = {"num_attention_heads": 8, "head_dim": 32, "intermediate_size": 256}
MODELS = {
    "llama": Model(partial(write_llama, **WIDE, attention_bias=True, mlp_bias=True)),
    "tied qwen3": Model(
        partial(write_llama, kind="qwen3", **{**WIDE, "num_key_value_heads": 8},
                tie_word_embeddings=True)),
    "qwen3_moe": Model(
        partial(write_llama, kind="qwen3_moe", moe_intermediate_size=96, num_attention_heads=4,
                num_key_value_heads=1, head_dim=32)),
    "deepseek_v3": Model(partial(write_deepseek, kind="deepseek_v3", **MLA)),
    "queries without a latent": Model(
        partial(write_deepseek, kind="deepseek_v2", **{**MLA, "q_lora_rank": None})),
    "gpt_oss": Model(place=EXAMPLE / "target"),
}  # fmt: skip
RANKS = [
    ("llama", 2), ("llama", 4), ("llama", 8), ("tied qwen3", 8), ("qwen3_moe", 4),
    ("deepseek_v3", 2), ("queries without a latent", 4), ("gpt_oss", 2),
]  # fmt: skip
QUICK = [("llama", 8), ("qwen3_moe", 4), ("deepseek_v3", 2)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], LoweredEngine]:
    @cache
    def place(name: str) -> Path:
        model = MODELS[name]
        if model.write is None:
            assert model.place is not None
            return model.place
        path = tmp_path_factory.mktemp(name.replace(" ", "-"))
        model.write(path)
        return path

    @cache
    def made(name: str, ranks: int) -> LoweredEngine:
        several = {"tensor_parallel": ranks} if ranks > 1 else {}
        return lowered_engine(place(name), None, nothing, **LIMITS, **several)

    return made


class InParts(PlanInterpreter):
    """One rank's memory, which adds up sums that ranks share in as many parts, from rank 0 on."""

    def __init__(self, host: PlanHost, parts: int) -> None:
        super().__init__(host.plan, host.memory._weight)
        self.parts = parts

    def call(self, call: OpCall, contributions: Sequence[torch.Tensor] = ()) -> None:
        summed = {"Linear": self._linear, "RmsMoe": self._moe}.get(call.op)
        # The query latents are projected per head, so no rank has a part of their sum.
        if summed is None or self._is_whole(call):
            super().call(call, contributions)
        else:
            bindings = {name: self._tensor(binding) for name, binding in call.inputs.items()}
            (y,) = call.outputs.values()
            self._tensor(y).copy_(summed(bindings, call.attributes))

    def _is_whole(self, call: OpCall) -> bool:
        return call.op == "Linear" and "residual" not in call.inputs

    def _linear(self, bindings: dict[str, torch.Tensor], _: dict[str, Any]) -> torch.Tensor:
        x, weight = bindings["x"].float(), unpack_rows(bindings["weight"]).float()
        pairs = zip(x.chunk(self.parts, 1), weight.chunk(self.parts, 1), strict=True)
        sums = [a.contiguous() @ b.contiguous().T for a, b in pairs]
        total = sums[0]
        for part in sums[1:]:
            total = total + part
        if "bias" in bindings:
            total = total + bindings["bias"].float()
        y = total.to(bindings["x"].dtype)
        return (bindings["residual"].float() + y.float()).to(y.dtype)

    def _moe(self, bindings: dict[str, torch.Tensor], attributes: dict[str, Any]) -> torch.Tensor:
        choice = dict(attributes)
        eps, rounding, logits, shared = map(choice.pop, ("eps", "rounding", "logits", "shared"))
        assert choice.pop("residual")
        assert not choice.pop("shared_gates")
        x, router = bindings["x"], (bindings["router_weight"], bindings["router_bias"])
        normed, scores = router_input(x, bindings["norm"], router, eps, rounding, logits)
        bias = unpack_gate_up_bias(bindings["gate_up_bias"])
        inner = bias.shape[1] // 2
        own = 32 * -(-inner // (32 * self.parts))
        # Experts in the format of Moe, padded with zeros to parts of full blocks.
        w1, w2 = values_of(bindings["gate_up"], bindings["down"], inner)
        lacking = self.parts * own - inner
        w1, bias = F.pad(w1, (0, 2 * lacking)), F.pad(bias, (0, 2 * lacking))
        w2 = F.pad(w2, (0, 0, 0, lacking))
        sums = []
        for part in range(self.parts):
            columns = slice(2 * own * part, 2 * own * (part + 1))
            rows = slice(own * part, own * (part + 1))
            last = bindings["down_bias"] * (part == 0)
            weights = (w1[:, :, columns], bias[:, columns], w2[:, rows], last)
            sums.append(mixed(normed.float(), scores, weights, bindings, shared, choice))
        total = sums[0]
        for each in sums[1:]:
            total = total + each
        return x + total.to(x.dtype)


def values_of(
    gate_up: torch.Tensor, down: torch.Tensor, inner: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' weights [E, H, 2·I] and [E, I, H] in fp32, with MXFP4 dequantized."""
    if gate_up.dtype != torch.uint8:
        return unpack_gate_up_values(gate_up).float(), unpack_down_values(down, inner).float()
    return decoded_mxfp4(*unpack_gate_up(gate_up)), decoded_mxfp4(*unpack_down(down, inner))


def decoded_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize blocks [E, N, K/32, 16] and scales [E, N, K/32] to [E, K, N] (OCP MX 1.0)."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    values = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
    scaled = values * torch.exp2(scales.float() - 127).unsqueeze(-1)
    return scaled.flatten(-2).transpose(1, 2)


def mixed(
    rows: torch.Tensor,
    scores: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    shared: int,
    choice: dict[str, Any],
) -> torch.Tensor:
    """Return the routed experts' sum plus, with weight 1, that of the last ``shared`` experts."""
    routed = len(inputs["router_weight"])

    def of(some: slice, logits: torch.Tensor, bias: Any, how: dict[str, Any]) -> torch.Tensor:
        w1, b1, w2, b2 = (weight[some] for weight in weights)
        return moe_reference(rows, logits, w1, None, b1, w2, None, b2, bias, **how)

    total = of(slice(routed), scores, inputs.get("choice_bias"), choice)
    certain = {**choice, "top_k": 1, "gating": "softmax_selected", "groups": 1,
               "groups_chosen": 1, "scaling": 1.0}  # fmt: skip
    for each in range(routed, routed + shared):
        total = total + of(slice(each, each + 1), scores.new_zeros(len(rows), 1), None, certain)
    return total


@pytest.mark.parametrize(
    ("name", "ranks"), [*QUICK, *slow(*(case for case in RANKS if case not in QUICK))]
)
def test_ranks_equal_one_rank_that_sums_in_parts(
    engines: Callable[[str, int], LoweredEngine], name: str, ranks: int
) -> None:
    several, one = RankHost(engines(name, ranks)), PlanHost(engines(name, 1))
    one.memory = InParts(one, ranks)
    logits = []
    for host in (several, one):
        host.give_pages(0)
        logits.append(host.score(0, IDS))
    assert torch.equal(*logits)
    # Sums in other parts differ, so rounding does not hide differences.
    ops = {call.op for call in several._programs["score@64"].ops}
    assert ops & {"RankMoe", "RankSum"} and not ops & {"RmsMoe"}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return where two runs differ first."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), None)


@pytest.mark.parametrize("name", ["llama", *slow("gpt_oss", "deepseek_v3")])
def test_ranks_select_the_tokens_of_one_gpu(
    engines: Callable[[str, int], LoweredEngine], name: str
) -> None:
    results = []
    for host in (RankHost(engines(name, 2)), PlanHost(engines(name, 1))):
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, IDS, 12)
        results.append([first, *host.generate(0, step_name(1), 11)])
    several, one = results
    differ = first_difference(several, one)
    if differ is not None:
        host = PlanHost(engines(name, 1))
        host.give_pages(0)
        gaps = host.score(0, [*IDS, *one[:differ]])[-1].topk(2).values
        assert gaps[0] - gaps[1] < NEAR_TIE, (several, one)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_ranks_share_the_vocabulary(
    engines: Callable[[str, int], LoweredEngine], temperature: float
) -> None:
    """Each rank reduces its own tokens; programs that write logits have the full head."""
    engine, runs = engines("llama", 2), []
    assert {"lm_head.packed", "lm_head.packed.sharded"} <= set(engine.weights)
    for full_logits in (False, True):
        host = RankHost(engine)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, IDS, TOKENS, temperature=temperature, seed=11)
        steps = step_name(1, full_logits=full_logits)
        runs.append([first, *host.generate(0, steps, TOKENS - 1)])
        ops = [call.op for call in host._programs[steps].ops]
        assert ("RankHeadChoose" in ops, "HeadChoose" in ops) == (not full_logits, False)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("temperature", "shape"), [(0.0, CHAIN), *slow((0.8, CHAIN), (0.8, TREE))])
def test_a_draft_changes_no_token_of_several_ranks(
    temperature: float, shape: DraftShape, drafted: LoweredEngine
) -> None:
    """Every rank has the full draft, and drafts the same tokens."""
    runs = []
    for program in (step_name(1), step_name(1, shape)):
        host = RankHost(drafted)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, IDS, TOKENS, temperature=temperature, seed=7)
        runs.append([first, *host.generate(0, program, TOKENS - 1)])
    assert runs[0] == runs[1]


@pytest.fixture(scope="module")
def drafted() -> LoweredEngine:
    limits = EXAMPLE_LIMITS | {"max_seq_len": 128}
    places = (EXAMPLE / "target", EXAMPLE / "draft")
    return lowered_engine(*places, nothing, **limits, tensor_parallel=2)


def test_programs_of_ranks_can_be_read_and_lowered(tmp_path: Path) -> None:
    """Include kernel launches: pointers to other ranks pass the checks of the runtime."""
    write_llama(tmp_path, **WIDE, num_hidden_layers=1, vocab_size=64)
    engine = lowered_engine(tmp_path, None, **LIMITS, tensor_parallel=4)
    host = RankHost(engine)
    files = {e.file: program_bytes(engine.writer.program(low)) for e, low in engine.programs}
    for entry in (entry for entry in host.plan.programs if entry.kind != "adjust"):
        launches = read_launches(files[entry.file], host.plan, entry)
        arguments = [argument for launch in launches for argument in launch.arguments]
        assert {a[1] for a in arguments if a[0] == PEER} == {1, 2, 3}
        assert (RANK,) in arguments
        # Two sums a layer, in several rounds for many rows; the head stores no logits.
        calls = read_program(files[entry.file], entry).ops
        exchanged = [call for call in calls if call.op.startswith("Rank")]
        head = [] if entry.full_logits else ["RankHeadChoose"]
        assert [call.op for call in exchanged] == ["RankSum", "RankSum", *head, "RankAdvance"]
        of_one = -(-entry.rows // 256)
        numbers = [call.attributes.get("exchange") for call in exchanged[:-1]]
        assert numbers == [0, of_one, 2 * of_one][: len(numbers)]
        assert exchanged[-1].attributes["rounds"] == entry.rounds == 2 * of_one + len(head)
    result = read_programs(host.plan, files.__getitem__)
    writer, programs = lower_again(result, CallLowering(target_of("sm_90a")))
    assert {e.file: program_bytes(writer.program(low)) for e, low in programs} == files
    assert writer.buffers == list(host.plan.buffers)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"tensor_parallel": 3}, "--tensor-parallel: got 3, expected 1, 2, 4 or 8"),
        ({"num_attention_heads": 20, "num_key_value_heads": 4, "hidden_size": 160, "head_dim": 64,
          "intermediate_size": 256},
         {"tensor_parallel": 8},
         "--tensor-parallel 8: the model has 20 query heads, which 8 GPUs cannot share; "
         "use 2 or 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 192},
         {"tensor_parallel": 2},
         "the model has 3 KV heads, which 2 GPUs cannot share; remove --tensor-parallel"),
        ({**WIDE, "intermediate_size": 192}, {"tensor_parallel": 4},
         "down_proj has K 192, which is not a multiple of 4 × 32; use 2"),
        (WIDE, {"tensor_parallel": 2, "specpv": True, "max_seq_len": 512,
                "specpv_partial_threshold": 256},
         "--tensor-parallel 2 and --specpv: not supported together; remove one"),
    ],
)  # fmt: skip
def test_rejects_models_that_gpus_cannot_share(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    write_llama(tmp_path, **changes)
    with pytest.raises(SpecbuildError, match=re.escape(message)):
        fused_engine(tmp_path, None, **{"max_seq_len": 64, "max_batch_size": 1, **options})


def test_other_backends_run_on_one_gpu(tmp_path: Path) -> None:
    build_options = BuildOptions.from_flat(model=tmp_path, output=tmp_path / "e", tensor_parallel=2)
    with pytest.raises(SpecbuildError, match="--tensor-parallel 2 needs --backend cuda"):
        CPU.options(build_options)


def test_one_gpu_is_the_default(tmp_path: Path) -> None:
    """--tensor-parallel 1 equals no option: the plan and every program have the same bytes."""
    write_llama(tmp_path, **WIDE, num_hidden_layers=1)
    plans = []
    for options in ({}, {"tensor_parallel": 1}):
        engine = lowered_engine(tmp_path, None, nothing, **LIMITS, **options)
        programs = [program_bytes(engine.writer.program(low)) for _, low in engine.programs]
        plans.append((json_bytes(stored_keys(PlanHost(engine).plan)), programs))
    assert plans[0] == plans[1]
    assert not any(word in plans[0][0] for word in (b"ranks", b"exchange", b"rounds"))
