"""Languages of the toy's tokens as automata, and decoding by their definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
import torch
from hypothesis import strategies as st
from toy_engine import toy_engine
from toy_model import EOS, VOCAB, choose, target_logits
from transformers import MinPLogitsWarper

from specbuild.runtime.engine import Engine
from specbuild.runtime.guides.compiler import GrammarCompiler, Vocabulary
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.settings import DEFAULT_SETTINGS, RuntimeSettings

# Token i is one character; the last one is the end of sequence.
LETTERS = "abcdefghijklmnopqrstuvwxyz01"


class _ToyTokens:
    bos_token_id = None
    eos_token_id = EOS
    tokens = (*(letter.encode() for letter in LETTERS), b"</s>")
    special_token_ids = (EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return [LETTERS.index(chr(byte)) for byte in text if chr(byte) in LETTERS]


def guided_engine(settings: RuntimeSettings = DEFAULT_SETTINGS, **options: object) -> Engine:
    """Return a toy engine with the toy's letters as its tokens."""
    return knowing_letters(toy_engine(settings, **options))


def knowing_letters(engine: Engine) -> Engine:
    """Return the engine, which compiles guides for the toy's letters."""
    tokens = llguidance.TokenizerWrapper(_ToyTokens())
    engine._grammars = GrammarCompiler(Vocabulary(tokens, VOCAB, (EOS,)))
    return engine


@dataclass(frozen=True)
class Language:
    """A deterministic automaton: ``steps[state]`` maps letters to states; 0 is the first state."""

    steps: tuple[Mapping[int, int], ...]
    ends: frozenset[int]

    @property
    def guide(self) -> Guide:
        """Return the automaton as a right-linear grammar."""
        rules = ["start: s0"]
        for state, steps in enumerate(self.steps):
            cases = [f'"{LETTERS[letter]}" s{to}' for letter, to in steps.items()]
            rules.append(f"s{state}: " + " | ".join([*cases, *(['""'] * (state in self.ends))]))
        return Guide.grammar("\n".join(rules))

    def state(self, output: Sequence[int]) -> int | None:
        """Return the state after an output, or None after an end of sequence."""
        state: int | None = 0
        for token in output:
            assert state is not None and (token == EOS or token in self.steps[state])
            assert token != EOS or state in self.ends
            state = None if token == EOS else self.steps[state][token]
        return state

    def allowed(self, output: Sequence[int]) -> list[int]:
        """Return the tokens that may follow; none if the output is complete."""
        state = self.state(output)
        if state is None or not self.steps[state]:
            return []
        return [*self.steps[state], *([EOS] if state in self.ends else [])]


@st.composite
def languages(draw: st.DrawFn) -> Language:
    """Draw random automata. An end can be reached from every state."""
    count = draw(st.integers(1, 5))
    letters = st.integers(0, len(LETTERS) - 1)
    steps = [
        dict(draw(st.dictionaries(letters, st.integers(0, count - 1), max_size=6)))
        for _ in range(count)
    ]
    ends = {count - 1} | draw(st.sets(st.integers(0, count - 1)))
    # An edge to the next state, so that the last one can be reached from all.
    for state in range(count - 1):
        steps[state][draw(letters)] = state + 1
    if count == 1 and not steps[0]:
        steps[0][draw(letters)] = 0
    return Language(tuple(steps), frozenset(ends))


def scores(
    tokens: Sequence[int], prompt: int, params: GenerateParams, allowed: list[int]
) -> np.ndarray:
    """Return the scores that the next token is sampled from, fp32 [V]."""
    sampling, output = params.sampling, list(tokens[prompt:])
    row = target_logits(tokens).copy()
    for token, bias in dict(sampling.logit_bias).items():
        row[token] += np.float32(bias)
    for token in set(output):
        row[token] -= np.float32(sampling.frequency_penalty) * np.float32(output.count(token))
    masked = np.full_like(row, -1e30)
    masked[allowed] = row[allowed]
    if sampling.min_p and sampling.temperature:
        scaled = torch.from_numpy(masked)[None] / sampling.temperature
        cut = MinPLogitsWarper(sampling.min_p)(torch.tensor([tokens]), scaled)[0]
        masked[(cut == -torch.inf).numpy()] = -1e30
    return masked


def decode_masked(
    prompt: Sequence[int], params: GenerateParams, language: Language | None
) -> list[int]:
    """Decode one token after another, each with a mask. Without a language nothing is masked."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_new_tokens:
        output = tokens[len(prompt) :]
        allowed = list(range(VOCAB)) if language is None else language.allowed(output)
        if not allowed:
            break
        row = scores(tokens, len(prompt), params, allowed)
        tokens.append(choose(row, params.sampling, len(tokens) - 1)[0])
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]
