"""Guides: with any draft, the tokens are those of masked decoding row by row."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from left_out import examples
from test_generate import parents_of
from toy_device import toy_cuda
from toy_engine import ON_DEMAND, TreeOfTokens, prompt, repeating, right, run, toy_engine, wrong
from toy_language import Language, decode_masked, guided_engine, knowing_letters, languages
from toy_model import EOS, VOCAB
from toy_partial import TOY_SPECPV, PartialToyExecutor, partial_manifest

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.compiler import GrammarCompiler, Vocabulary
from specbuild.runtime.guides.guide import MAX_GUIDE_BYTES, Guide
from specbuild.runtime.guides.token_rules import RuledGrammar
from specbuild.runtime.request import GenerateParams, SequenceState
from specbuild.runtime.sampling import SamplingParams

PROMPTS = [[1, 2, 3, 2, 9], [4] * 11, [7, 5]]
SHAPES = [None, DraftShape(1, 3, 3), DraftShape(3, 4, 12)]
# One letter after another, at whose end another one begins or nothing does.
LINE = Language(({0: 1}, {1: 2}, {2: 3, 3: 3}, {4: 0, 5: 4}, {}), frozenset({4}))

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 2**31 - 1),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.2]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=2),
)


@examples(8)
@example(LINE, SamplingParams(), SHAPES[1])
@example(LINE, SamplingParams(0.9, top_k=3, seed=5), SHAPES[2])
@given(languages(), samplings, st.sampled_from(SHAPES))
def test_outputs_equal_masked_decoding(
    language: Language, sampling: SamplingParams, shape: DraftShape | None
) -> None:
    guided = GenerateParams(max_new_tokens=14, sampling=sampling, guide=language.guide)
    # Another sequence without a guide has the tokens that it has alone.
    plain = GenerateParams(max_new_tokens=14, sampling=SamplingParams(sampling.temperature, seed=3))
    each, known = [guided, plain, guided], [language, None, language]
    ran = run(guided_engine(), PROMPTS, each, speculation=shape)
    assert ran.ids == [decode_masked(*of) for of in zip(PROMPTS, each, known, strict=True)]
    assert ran.records[1].stats.masked_tokens is None
    for record in (ran.records[0], ran.records[2]):
        if record.finish_reason != "length":
            assert not language.allowed(record.output_ids)


def allowed_first(depth: int, language: Language) -> object:
    """Draft the tokens of the masked target, and others after ``depth`` of them."""

    def rule(sequence: SequenceState, path: tuple[int, ...], siblings: list[int]) -> int:
        output = [*sequence.output.tolist(), *path]
        tokens = [*sequence.ids[: sequence.num_tokens].tolist(), *path]
        following = decode_masked(tokens, replace(sequence.request.params, max_new_tokens=1), None)
        if len(path) < depth:
            try:
                allowed = language.allowed(output)
            except AssertionError:
                allowed = []
            following = [t for t in allowed if t not in siblings] or following
        token = following[0]
        while token in siblings:
            token = (token + 1) % VOCAB
        return token

    return rule


@examples(8)
@given(
    languages(),
    st.integers(0, 4).flatmap(lambda n: st.sampled_from([right, wrong, repeating, n])),
    parents_of(4),
    samplings,
)
def test_a_mask_at_any_depth_of_any_tree_changes_nothing(
    language: Language, rule: object, parents: list[int], sampling: SamplingParams
) -> None:
    made = allowed_first(rule, language) if isinstance(rule, int) else rule
    drafter = TreeOfTokens(made, parents, reads_aux_hidden=True)
    params = GenerateParams(max_new_tokens=14, sampling=sampling, guide=language.guide)
    ran = run(
        guided_engine(), PROMPTS[:2], params, drafter=drafter, speculation=DraftShape(3, 4, 12)
    )
    assert ran.ids == [decode_masked(p, params, language) for p in PROMPTS[:2]]


def test_forced_tokens_need_no_draft() -> None:
    word = Guide.choice(["abcdefgh"])
    drafter = TreeOfTokens(wrong, [-1, 0, 1])
    params = GenerateParams(max_new_tokens=20, guide=word)
    ran = run(
        guided_engine(), PROMPTS[:1], params, drafter=drafter, speculation=DraftShape(1, 3, 3)
    )
    (record,) = ran.records
    assert (ran.ids, record.finish_reason) == ([[*range(8)]], "stop")
    # The prompt gives one token, a chain of four and the token behind it five, the end the rest.
    assert (record.stats.steps, drafter.proposals) == (2, [])
    assert record.stats.acceptance_histogram == (0, 0, 1, 0, 1)


@examples(8)
@example(LINE, SamplingParams(), 3)
@given(languages(), samplings, st.integers(1, 6))
def test_forced_tokens_without_a_draft_change_nothing(
    language: Language, sampling: SamplingParams, longest: int
) -> None:
    """An engine without a draft, with capacity for chains of any length, beside other requests."""
    guided = GenerateParams(max_new_tokens=14, sampling=sampling, guide=language.guide)
    plain = replace(guided, guide=None)
    engine = guided_engine(drafted=False, limits=DraftShape(1, longest, longest))
    ran = run(engine, PROMPTS, [guided, plain, guided])
    known = [language, None, language]
    each = [guided, plain, guided]
    assert ran.ids == [decode_masked(*of) for of in zip(PROMPTS, each, known, strict=True)]


def test_a_step_without_a_draft_accepts_a_run_of_forced_tokens() -> None:
    """Sequences have runs of different lengths in one step, and some have none."""
    words, chain = ["abcdefgh", "klm"], DraftShape(1, 7, 7)
    each = [GenerateParams(max_new_tokens=20, guide=Guide.choice([word])) for word in words]
    free = GenerateParams(max_new_tokens=20, ignore_eos=True)
    engine = guided_engine(drafted=False, limits=chain)
    ran = run(engine, PROMPTS, [*each, free])
    assert ran.ids[:2] == [[*range(8)], [10, 11, 12]]
    # The prompt gives the first token; a chain of all others ends the output.
    assert [record.stats.steps for record in ran.records] == [1, 1, 19]
    assert ran.records[0].stats.acceptance_histogram == (0, 0, 0, 0, 0, 0, 0, 1)
    assert ran.ids[2] == decode_masked(PROMPTS[2], free, None)
    refused = run(guided_engine(drafted=False, limits=chain), PROMPTS[:1], each[0], drafter="none")
    assert (refused.ids, refused.records[0].stats.steps) == (ran.ids[:1], 7)


def test_few_pages_change_nothing() -> None:
    params = GenerateParams(
        max_new_tokens=30, sampling=SamplingParams(0.8, seed=4), guide=Guide.regex("[a-p]{40}")
    )
    whole = run(guided_engine(), PROMPTS, params, speculation=None)
    engine = guided_engine(ON_DEMAND, kv_pages=22)
    few = run(engine, PROMPTS, params, speculation=SHAPES[1])
    assert sum(record.stats.preemptions for record in few.records) > 0
    assert few.ids == whole.ids
    assert any(record.stats.masked_tokens for record in few.records)


@pytest.mark.parametrize("shape", SHAPES)
def test_reverified_tokens_are_masked_again(shape: DraftShape | None) -> None:
    # A view of everything agrees with a full step, at tokens that masks chose too.
    manifest = partial_manifest(replace(TOY_SPECPV, n_retrieval_blocks=8))
    params = GenerateParams(max_new_tokens=40, guide=Guide.regex("[a-p]{40}"))
    engine = knowing_letters(Engine(manifest, PartialToyExecutor(manifest)))
    record = run(engine, PROMPTS[1:2], params, speculation=shape).records[0]
    seen = record.stats.specpv
    assert seen is not None and seen.rechecked_tokens > 0 and seen.agreement == 1.0
    assert record.stats.masked_tokens
    whole = run(guided_engine(), PROMPTS[1:2], params, speculation=None).records[0]
    assert (record.output_ids, record.stats.masked_tokens) == (
        whole.output_ids,
        whole.stats.masked_tokens,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_are_computed_from_the_raw_logits(shape: DraftShape | None) -> None:
    params = GenerateParams(
        max_new_tokens=20, guide=Guide.regex("[a-d]{20}"), top_logprobs=VOCAB - 9
    )
    ran = run(guided_engine(), PROMPTS[:1], params, speculation=shape)
    assert ran.records[0].stats.masked_tokens
    for event in ran.events[0]:
        best = dict(event.top_logprobs)
        if event.token_id in best:
            assert event.logprob == pytest.approx(best[event.token_id], abs=1e-5)


def test_the_grammar_overrides_min_tokens() -> None:
    word = GenerateParams(max_new_tokens=20, min_tokens=9, guide=Guide.choice(["abc", "abcd"]))
    (record,) = run(guided_engine(), PROMPTS[:1], word, speculation=SHAPES[1]).records
    assert record.output_ids == (0, 1, 2, 3)
    ended = replace(word, guide=Guide.grammar('start: "ab" TAIL?\nTAIL: "c"'), ignore_eos=True)
    (record,) = run(guided_engine(), PROMPTS[:1], ended, speculation=SHAPES[1]).records
    assert record.output_ids in ((0, 1, EOS), (0, 1, 2))


def test_a_grammar_that_exceeds_its_limits_fails_its_request_only() -> None:
    # No token of the vocabulary is a space.
    stuck = GenerateParams(max_new_tokens=20, guide=Guide.regex("abc d"))
    plain = GenerateParams(max_new_tokens=20)
    ran = run(guided_engine(), PROMPTS[:2], [stuck, plain], speculation=SHAPES[1])
    assert ran.records[0].finish_reason == "guide_failed"
    assert ran.ids[1] == decode_masked(PROMPTS[1], plain, None)


REFUSED = [
    (lambda: Guide.json("{"), "is no JSON Schema"),
    (lambda: Guide.json({"enum": [float("nan")]}), "is no JSON Schema"),
    (lambda: Guide.json("[]"), "must be an object"),
    (lambda: Guide.json("[" * 100_000), "is no JSON Schema"),
    (lambda: Guide.json(False), "allows nothing"),
    (lambda: Guide.regex(""), "is empty"),
    (lambda: Guide.regex("a" * (MAX_GUIDE_BYTES + 1)), f"may have {MAX_GUIDE_BYTES}"),
    (lambda: Guide.regex(7), "must be a text"),  # type: ignore[arg-type]
    (lambda: Guide.regex("\ud800"), "is not Unicode"),
    (lambda: Guide.choice([]), "must be 1 to"),
    (lambda: Guide.choice(["a", ""]), "none of them empty"),
    (lambda: Guide.choice("ab"), "must be a list"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_rejects_invalid_guides(make: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        make()  # type: ignore[operator]
    assert caught.value.field == "guide"


def _props(count: int) -> str:
    return json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(count)}})


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide.regex("(a", name="guided_regex"), "cannot be compiled"),
        (Guide.grammar("start: missing", name="guided_grammar"), "missing"),
        (Guide.json({"$ref": "http://a.example/b"}, name="response_format"), "cannot be compiled"),
        (Guide.json({"type": "string", "format": "no-such"}, name="f"), "no-such"),
        (Guide.json(_props(12000), name="f"), "too big"),
        (Guide.json('{"items":' * 200 + "{}" + "}" * 200, name="f"), "recursion"),
    ],
)
def test_the_error_names_a_guide_that_does_not_compile(guide: Guide, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        guided_engine().compile(guide)
    assert caught.value.field == guide.name and str(caught.value).startswith(guide.name)


def test_engines_without_guides_reject_them() -> None:
    params = GenerateParams(guide=Guide.regex("[ab]", name="response_format"))
    with pytest.raises(RequestError, match="response_format needs a tokenizer"):
        toy_engine().generate([prompt([1])], params)
    cuda = toy_cuda(adjusted_steps=False).engine
    cuda._grammars = guided_engine()._grammars
    with pytest.raises(RequestError, match="this engine has no programs for response_format") as no:
        cuda.generate([prompt([1])], params)
    assert no.value.field == "response_format"


def test_states_of_one_grammar_are_independent() -> None:
    grammar = guided_engine().compile(LINE.guide)
    one, other = grammar.begin(), grammar.begin()
    walk = np.array([0, 1, 2, 5], np.int32)
    assert one.complete(walk) and not other.complete(walk[:1])
    for length in (3, 1, 4, 0, 2):
        assert (mask := one.mask(walk[:length])) is None or [
            token for token in range(VOCAB) if mask.allows(token)
        ] == LINE.allowed(walk[:length].tolist())
    assert other.forced(walk[:1]) == [1] and one.forced(walk) == []


FORMS = [
    Guide.json(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "kind": {"enum": ["red", "green", "greenish"]},
                "count": {"type": "number"},
            },
            "required": ["name", "kind"],
        }
    ),
    Guide.regex("class [A-Z][a-z]{2,9}:"),
    Guide.choice(["yes", "no", "perhaps not", "perhaps"]),
    Guide.grammar('start: "a" start "b" | "ab"'),
]


@pytest.mark.parametrize("guide", FORMS, ids=lambda guide: guide.kind)
def test_allows_agrees_with_the_mask(guide: Guide) -> None:
    """With many tokenizations of a text, along outputs that the form allows."""
    path = Path(__file__).parents[3] / "examples" / "tiny-gpt-oss" / "target"
    config = json.loads((path / "config.json").read_text())
    size, end = config["vocab_size"], config["eos_token_id"]
    tokenizer = (path / "tokenizer.json").read_text()
    grammar = GrammarCompiler(Vocabulary(tokenizer, size, (end,))).compile(guide)
    random, forced = np.random.default_rng(3), 0
    for _ in range(3):
        state, other, output = grammar.begin(), grammar.begin(), np.zeros(0, np.int32)
        while len(output) < 30 and (mask := state.mask(output)) is not None:
            allowed = [token for token in range(size) if mask.allows(token)]
            assert [t for t in range(size) if other.allows(output, t)] == allowed
            assert (other.forced(output) != []) == (len(allowed) == 1)
            forced += len(allowed) == 1
            output = np.append(output, np.int32(random.choice(allowed)))
        assert len(output) == 30 or other.allows(output, 0) is None
    assert forced


@pytest.mark.parametrize("guide", FORMS, ids=lambda guide: guide.kind)
def test_check_agrees_with_allows(guide: Guide) -> None:
    """For tokens of which one is not allowed, and tokens after the end of the output."""
    path = Path(__file__).parents[3] / "examples" / "tiny-gpt-oss" / "target"
    config = json.loads((path / "config.json").read_text())
    size, end = config["vocab_size"], config["eos_token_id"]
    tokenizer = (path / "tokenizer.json").read_text()
    grammar = GrammarCompiler(Vocabulary(tokenizer, size, (end,))).compile(guide)
    ruled = RuledGrammar(grammar, size, [(7, 9)])
    random, seen = np.random.default_rng(4), Counter[str]()
    for begin in (grammar.begin, grammar.begin, ruled.begin):
        state, other, walk = begin(), begin(), np.zeros(0, np.int32)
        while len(walk) < 40 and (mask := other.mask(walk)) is not None:
            allowed = [token for token in range(size) if mask.allows(token)]
            walk = np.append(walk, np.int32(random.choice(allowed)))
        start = 0
        while start < len(walk):
            tokens = walk[start : start + int(random.integers(1, 9))].tolist()
            if random.random() < 0.5:
                tokens[int(random.integers(len(tokens)))] = int(random.integers(size))
            if random.random() < 0.3:
                tokens += [int(random.integers(size))]
            output, only, refused = walk[:start], [], False
            for token in tokens:
                allows = other.allows(output, token)
                if allows is None:
                    break
                only.append(bool(other.forced(output)))
                refused = not allows
                if refused:
                    break
                output = np.append(output, np.int32(token))
            result = state.check(walk[:start], tokens)
            count = len(output) - start
            assert (result.num_allowed, result.is_refused) == (count, refused)
            assert list(result.is_only) == only and list(result.forced) == other.forced(output)
            assert result.is_complete == other.complete(output)
            seen.update(refused=refused, complete=result.is_complete, several=count > 1)
            start += int(random.integers(1, 5))
    assert seen["refused"] and seen["several"]
    assert seen["complete"] or guide.kind in ("json", "grammar")
