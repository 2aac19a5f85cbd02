"""Engines of Gemma 4 that draft with an assistant, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Command
from draft_rounds import best_paths, paths_of
from drafted_outputs import check_greedy, check_sampled, drafted_outputs
from gemma4_assistants import TYPES, write_assistant
from left_out import slow
from llama_checkpoints import VOCAB, write_llama
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.plan.interpret import PlanInterpreter
from specbuild.builder.build import build
from specbuild.builder.families.gemma4_assistant.model import UNREAD_LOGIT
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.frozen_target import load_target
from specbuild.builder.verify import verify_engine
from specbuild.runtime.draft.gemma4_assistant import AssistantDrafter
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import OpCall
from specbuild.runtime.request import SequenceState

CHAIN, TREE = DraftShape(1, 4, 4), DraftShape(3, 3, 9)
# The changes of a model, by name: keys as values; caches that layers share, inputs of layers, and
# an assistant whose head reads clusters.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "31B": ("gemma4_text", {}),
    "E2B": (
        "gemma4_text",
        {
            "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB, "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
        },
    ),
    "12B": ("gemma4_unified_text", {}),
}  # fmt: skip
WINDOW = 12
each_model = pytest.mark.parametrize("name", ["31B", "E2B", *slow("12B")])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model, its assistant and their engine, built at its first use."""

    @cache
    def make(name: str) -> Path:
        folder, (kind, changes) = tmp_path_factory.mktemp("assistant"), MODELS[name]
        write_llama(folder / "model", kind, **changes)
        write_assistant(folder / "draft", kind, target=changes, clustered=name == "E2B")
        options = BuildOptions(
            model=folder / "model",
            draft=folder / "draft",
            output=folder / "engine",
            limits=LimitOptions(max_seq_len=128, max_batch_size=3),
        )
        build(options, SilentProgress())
        return folder

    return make


class Plain:
    """transformers' assistant over its target's keys and values, computed anew for each path."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.target = load_target(folder / "model", teacher=False)
        self.assistant = AutoModelForCausalLM.from_pretrained(
            folder / "draft", attn_implementation="eager"
        ).eval()

    @cache  # noqa: B019 - the object lives as long as its test
    def outputs_of(self, ids: tuple[int, ...]) -> Any:
        """The target's keys, values and final states of these tokens."""
        return self.target.model(
            input_ids=torch.tensor([ids]), use_cache=False, return_shared_kv_states=True
        )

    @torch.no_grad()
    def logits(self, ids: tuple[int, ...], path: tuple[int, ...]) -> torch.Tensor:
        """Return the logits after a path of drafted tokens; the last of ``ids`` is the root.

        A row at the root's position sees keys less than a window before it, not those of the root.
        """
        outputs, position = self.outputs_of(ids[:-1]), len(ids) - 1
        shared = dict(outputs.shared_kv_states)
        first = max(0, position - WINDOW + 1)
        shared["sliding_attention"] = tuple(t[:, :, first:] for t in shared["sliding_attention"])
        state, logits = outputs.last_hidden_state[:, -1:], torch.empty(0)
        for token in (ids[-1], *path):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            step = self.assistant(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
            )
            state, logits = step.last_hidden_state, step.logits[0, 0]
        if self.assistant.config.use_ordered_embeddings:
            # All other logits are lower than those of the read clusters, by one.
            logits[logits == logits.min()] = -torch.inf
        return logits


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@each_model
def test_drafts_are_those_of_transformers(
    built, monkeypatch: pytest.MonkeyPatch, name: str, shape: DraftShape
) -> None:
    """At every step of three sequences, of which two exceed the window."""
    drafts: list[tuple[tuple[int, ...], DraftShape, set[tuple[int, ...]]]] = []
    propose = AssistantDrafter.propose

    def recorded(
        drafter: AssistantDrafter, sequences: list[SequenceState], shape: DraftShape
    ) -> DraftTrees:
        trees = propose(drafter, sequences, shape)
        for b, sequence in enumerate(sequences):
            ids = tuple(sequence.ids[: sequence.length + 1].tolist())
            drafts.append((ids, shape, paths_of(trees, b)))
        return trees

    monkeypatch.setattr(AssistantDrafter, "propose", recorded)
    folder = built(name)
    prompts = [tuple(range(3, 3 + count)) for count in (1, 9, 25)]
    drafted_outputs(folder / "engine", prompts, shape, new_tokens=16)
    plain, vocabulary = Plain(folder), torch.arange(VOCAB)
    for ids, drafted, paths in drafts:
        expected = best_paths(lambda path, ids=ids: plain.logits(ids, path), vocabulary, drafted)
        assert paths == expected
    assert sum(len(ids) > WINDOW for ids, *_ in drafts) > 10


@torch.no_grad()
def test_the_first_draft_is_that_of_transformers_candidate_generator(
    built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt within the window, where its masks and ours agree."""
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import (
        SinglePositionMultiTokenCandidateGenerator,
    )

    plain, prompt = Plain(built("31B")), tuple(range(3, 11))
    outputs = plain.outputs_of(prompt)
    root = int(plain.target.lm_head(outputs.last_hidden_state[0, -1]).argmax())
    ids = torch.tensor([(*prompt, root)])
    plain.assistant.generation_config.num_assistant_tokens = 4
    generator = SinglePositionMultiTokenCandidateGenerator(
        ids, plain.assistant, plain.target.get_input_embeddings(),
        GenerationConfig(max_length=512, eos_token_id=None, num_assistant_tokens=4), {},
    )  # fmt: skip
    candidates, _ = generator.get_candidates(
        ids, {"attention_mask": torch.ones_like(ids)},
        SimpleNamespace(
            hidden_states=[outputs.last_hidden_state], shared_kv_states=outputs.shared_kv_states
        ),
        is_first_iteration=False, n_last_matches=len(prompt) - 1,
    )  # fmt: skip
    drafted: list[list[int]] = []
    propose = AssistantDrafter.propose

    def recorded(drafter: Any, sequences: Any, shape: DraftShape) -> DraftTrees:
        trees = propose(drafter, sequences, shape)
        drafted.append(trees.tokens[0].tolist())
        return trees

    monkeypatch.setattr(AssistantDrafter, "propose", recorded)
    drafted_outputs(built("31B") / "engine", [prompt], CHAIN, new_tokens=8)
    assert drafted[0] == candidates[0, len(prompt) :].tolist()


@torch.no_grad()
def test_cuda_programs_read_the_clusters_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the head's logits with those of transformers for the same states, at every level."""
    from transformers import AutoModelForCausalLM

    sizes = {"num_hidden_layers": len(TYPES), "layer_types": list(TYPES)}
    write_llama(tmp_path / "model", "gemma4_text", dtype="bfloat16", **sizes)
    write_assistant(
        tmp_path / "draft", target=sizes, dtype="bfloat16", clustered=True, intermediate_size=96
    )
    engine = lowered_engine(
        tmp_path / "model", tmp_path / "draft", max_seq_len=64, max_batch_size=2, page_size=16,
        draft_top_k=TREE.draft_top_k, draft_depth=TREE.draft_depth, draft_tokens=TREE.draft_tokens,
    )  # fmt: skip
    drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
    call_op = PlanInterpreter.call

    def recorded(self: PlanInterpreter, call: OpCall, *contributions: Any) -> None:
        call_op(self, call, *contributions)
        if call.op == "ClusterLogits":
            x, rows = (self._tensor(call.inputs[name]) for name in ("x", "logit_rows"))
            states, logits = x[rows.long()].float(), self._tensor(call.outputs["logits"])
            drafted.extend(zip(states, logits.clone(), strict=True))

    monkeypatch.setattr(PlanInterpreter, "call", recorded)
    host = PlanHost(engine)
    host.port("ignore_eos").fill_(1)
    for row, count in enumerate((9, 25)):
        host.admit(row, list(range(3, 3 + count)), 30)
    chain = DraftShape(1, TREE.draft_depth, TREE.draft_depth)
    for shape in (chain, TREE, chain):
        host.step(step_name(2, shape))
    rows_of_tree = 1 + (TREE.draft_depth - 1) * TREE.draft_top_k
    assert len(drafted) == 2 * (2 * chain.draft_depth + rows_of_tree)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    head = assistant.lm_head.weight
    for state, logits in drafted:
        expected = assistant.masked_embedding(state[None, None], head)[0, 0]
        is_read = expected > expected.min()
        assert int(is_read.sum()) == 3 * VOCAB // 8
        assert torch.equal(logits > UNREAD_LOGIT, is_read)
        torch.testing.assert_close(logits[is_read], expected[is_read])
        # TreeExpand ranks equal logits slowly.
        assert len(logits[~is_read].unique()) == int((~is_read).sum())


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@each_model
def test_greedy_output_is_that_of_transformers(built, name: str, shape: DraftShape) -> None:
    check_greedy(built(name), shape)


@each_model
def test_sampled_output_does_not_depend_on_the_draft(built, name: str) -> None:
    check_sampled(built(name), (CHAIN, TREE))


@each_model
def test_verify_compares_the_draft(built, name: str) -> None:
    folder = built(name)
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    stages = {row.stage: row for row in report.rows}
    for stage in ("fuse", "draft recurrence", "draft logits"):
        assert stages[stage].rows > 0 and stages[stage].max_error < 2e-4
    assert report.passed


def test_the_manifest_has_a_drafter_without_caches(built, command: Command) -> None:
    engine = built("31B") / "engine"
    manifest = json.loads((engine / "manifest.json").read_text())
    (drafter,) = manifest["drafters"]
    assert drafter["kind"] == "gemma4-assistant"
    assert "gemma4_assistant" in manifest["features"]
    groups = {group["name"]: group for group in manifest["cache_groups"]}
    assert groups["draft"]["layers"] == []
    inputs = {port["name"] for port in manifest["roles"]["draft"]["inputs"]}
    pools = {name for name in inputs if name.endswith("_pool")}
    # The last layer of each type.
    assert pools == {
        f"{group}.{layer}.{part}_pool"
        for group, layer in (("sliding", 2), ("full", 3))
        for part in "kv"
    }
    shown = command("inspect", engine)
    assert shown.code == 0 and "assistant, which reads the model's caches" in shown.out
