"""Log-probabilities of tokens and of the most likely alternatives, in OpenAI's and vLLM's forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbuild.runtime.decode.scoring import TokenScore
from specbuild.runtime.request import TokenEvent, TopLogprobs
from specbuild.runtime.serve.serving import Serving


class TokenTexts:
    """The texts that stand for tokens: with ``as_ids`` ``token_id:11``, as in vLLM.

    The server's options may request this for all tokens.
    """

    def __init__(self, serving: Serving, *, as_ids: bool) -> None:
        self._serving = serving
        self._as_ids = as_ids or serving.service.options.tokens_as_ids

    def text(self, token_id: int) -> str:
        """Return the text of a token."""
        return f"token_id:{token_id}" if self._as_ids else self._serving.text_of([token_id])

    def token_logprob(self, token: TokenEvent) -> dict[str, Any]:
        """Return the entry of a token of a chat or a response."""
        top_logprobs = [self._entry(*pair) for pair in token.top_logprobs]
        return self._entry(token.token_id, _logprob(token)) | {"top_logprobs": top_logprobs}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def completion_logprobs(self, tokens: Sequence[TokenEvent], *, offset: int) -> dict[str, Any]:
        """Return the log-probabilities of a completion's tokens, whose text starts at ``offset``.

        ``top_logprobs`` has the most likely tokens at each position, and the chosen one if it is
        not among them.
        """
        entries = [(token.token_id, _logprob(token), token.top_logprobs) for token in tokens]
        return self._completion_logprobs(entries, offset)

    def prompt_completion_logprobs(
        self, first: int, scores: Sequence[TokenScore]
    ) -> dict[str, Any]:
        """Return the log-probabilities of an echoed prompt, whose ``first`` token has none."""
        entries = [(first, None, ()), *((s.token_id, s.logprob, s.top_logprobs) for s in scores)]
        return self._completion_logprobs(entries, 0)

    def _completion_logprobs(
        self,
        entries: Sequence[tuple[int, float | None, TopLogprobs]],
        offset: int,
    ) -> dict[str, Any]:
        texts = [self.text(token_id) for token_id, _, _ in entries]
        offsets = []
        for token_id, text in zip((e[0] for e in entries), texts, strict=True):
            offsets.append(offset)
            offset += len(self._serving.text_of([token_id]) if self._as_ids else text)
        tops = [
            None if logprob is None else self._by_text(text, logprob, top)
            for text, (_, logprob, top) in zip(texts, entries, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob, _ in entries],
            "text_offset": offsets,
            "top_logprobs": tops,
        }

    def _by_text(self, text: str, logprob: float, top: TopLogprobs) -> dict[str, float]:
        """Return log-probabilities by text. Of tokens with equal text the likeliest one is kept."""
        logprobs: dict[str, float] = {}
        for token_id, value in top:
            logprobs.setdefault(self.text(token_id), value)
        logprobs.setdefault(text, logprob)
        return logprobs

    def prompt_logprobs(self, scores: Sequence[TokenScore]) -> list[dict[str, Any] | None]:
        """Return vLLM's ``prompt_logprobs``: null, then an object by token id for each token."""
        return [None, *map(self._score, scores)]

    def _score(self, score: TokenScore) -> dict[str, Any]:
        values = {score.token_id: (score.logprob, score.rank)}
        for rank, (token_id, logprob) in enumerate(score.top_logprobs, 1):
            values.setdefault(token_id, (logprob, rank))
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self.text(token_id),
            }
            for token_id, (logprob, rank) in values.items()
        }


def joined_logprobs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities of two consecutive parts of a completion."""
    return {
        name: None if values is None else values + second[name] for name, values in first.items()
    }


def _logprob(token: TokenEvent) -> float:
    """Return the log-probability of a token. Its request must have set ``logprobs``."""
    assert token.logprob is not None
    return token.logprob
