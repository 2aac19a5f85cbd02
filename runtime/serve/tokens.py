"""``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve.errors import engine_error, invalid_value
from specbuild.runtime.serve.messages import template_messages, tool_list
from specbuild.runtime.serve.request_fields import JsonList, RequestFields, RouteName
from specbuild.runtime.serve.serving import MAX_TOKENIZED_SEQUENCES, ChatPromptOptions, Serving


class TokenizeFields(RequestFields):
    """A prompt, or the messages of a chat."""

    route: ClassVar[RouteName] = "tokenize"
    model: str | None = None
    prompt: str | None = None
    messages: JsonList[dict[str, Any]] | None = None
    tools: JsonList[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeFields(RequestFields):
    """Token ids."""

    route: ClassVar[RouteName] = "detokenize"
    model: str | None = None
    tokens: JsonList[int]


class TokenRoutes:
    """Handles tokenization."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def tokenize(self, body: TokenizeFields) -> Mapping[str, Any]:
        """Return the token ids of a text or a chat, as generation would use them."""
        serving = self._serving
        serving.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid_value("prompt", "give either prompt or messages")
        try:
            if body.prompt is not None:
                ids = await serving.text_ids(body.prompt, body.add_special_tokens is not False)
            else:
                chat = await serving.chat_prompt(
                    template_messages(body.messages or []),
                    tool_list(body.tools),
                    body.chat_template_kwargs or {},
                    ChatPromptOptions.of(
                        body.add_generation_prompt,
                        body.continue_final_message,
                        add_special_tokens=bool(body.add_special_tokens),
                        template=body.chat_template,
                    ),
                )
                ids = chat.ids
        except RequestError as error:
            raise engine_error(error) from error
        answer: dict[str, Any] = {
            "tokens": list(ids),
            "count": len(ids),
            "max_model_len": serving.service.engine.manifest.limits.max_seq_len,
        }
        answer["token_strs"] = serving.codec.words(ids) if body.return_token_strs else None
        return answer

    async def detokenize(self, body: DetokenizeFields) -> Mapping[str, Any]:
        """Return the text of token ids."""
        serving = self._serving
        serving.model(body.model)
        max_tokens = MAX_TOKENIZED_SEQUENCES * serving.max_seq_len
        if len(body.tokens) > max_tokens:
            raise invalid_value(
                "tokens", f"tokens has {len(body.tokens)} ids, at most {max_tokens}"
            )
        vocab = serving.service.engine.manifest.target.vocab
        for token_id in body.tokens:
            if not 0 <= token_id < vocab:
                raise invalid_value(
                    "tokens", f"token id {token_id} is outside the vocabulary of {vocab}"
                )
        return {"prompt": await serving.service.in_thread(serving.codec.decode, body.tokens)}
