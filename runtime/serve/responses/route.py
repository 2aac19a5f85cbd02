"""Makes responses: at once, as a stream of named events, or in the background."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from specbuild.runtime.request import Request
from specbuild.runtime.serve.chat import chat_prompt, chat_requests, offered_tools
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.http import Chunks
from specbuild.runtime.serve.messages import template_messages
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.call_forms import Tools
from specbuild.runtime.serve.parsers.parser import ChatPrompt
from specbuild.runtime.serve.responses.fields import ResponseFields, messages_of
from specbuild.runtime.serve.responses.items import Items, ResponseEvent
from specbuild.runtime.serve.responses.store import ResponseStore
from specbuild.runtime.serve.serving import Serving
from specbuild.runtime.serve.structured import asked_form
from specbuild.runtime.serve.token_logprobs import token_logprob, top_logprobs
from specbuild.runtime.serve.turns import Turns


@dataclass
class _Work:
    """A response that is being made."""

    body: ResponseFields
    request: Request
    prompt: ChatPrompt
    messages: Sequence[Mapping[str, Any]]
    answer: dict[str, Any]
    items: Items
    turns: Turns
    tools: Tools


class Responses:
    """The routes, over a server."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore()

    async def answer(self, body: ResponseFields) -> Mapping[str, Any] | Chunks:
        """A response, the events of one, or the promise of one."""
        work = await self._begin(body)
        if body.stream:
            return self._stream(work)
        if body.background:
            stored = self._store.put(work.answer, work.messages)
            stored.items = work.items
            stored.task = asyncio.create_task(self._in_background(work))
            return dict(work.answer)
        await self._finish(work)
        return work.answer

    def retrieve(self, name: str) -> Mapping[str, Any]:
        """A stored answer as it is now."""
        return self._store.get(name).shown()

    def delete(self, name: str) -> Mapping[str, Any]:
        """Forgets a stored answer."""
        self._store.delete(name)
        return {"id": name, "object": "response", "deleted": True}

    async def cancel(self, name: str) -> Mapping[str, Any]:
        """Ends one that is made in the background, with what it has so far."""
        stored = self._store.get(name)
        if stored.task is None:
            raise ApiError(400, "only responses made in the background can be cancelled")
        if not stored.task.done():
            stored.task.cancel()
            await asyncio.wait({stored.task})
            stored.answer["status"] = "cancelled"
        return stored.shown()

    async def _begin(self, body: ResponseFields) -> _Work:
        serving = self._serving
        model = serving.model(body.model)
        body.check()
        before: Sequence[Mapping[str, Any]] = ()
        if body.previous_response_id is not None:
            before = self._store.get(body.previous_response_id).messages
        messages = [*before, *body.messages()]
        told = [] if body.instructions is None else [_system(body.instructions)]
        tools = offered_tools(serving, body.tools, body.tool_choice)
        likeliest = None
        if body.logprobs:
            likeliest = top_logprobs("top_logprobs", body.top_logprobs)
        asked = asked_form(body.guide(), tools, body.tool_choice, parallel=body.parallel_tool_calls)
        chat = template_messages([*told, *messages])
        prompt = await chat_prompt(serving, chat, tools, body.variables)
        each = body.params(
            max_tokens=body.max_output_tokens,
            text=False,
            likeliest=likeliest,
            guide=await serving.guide(asked, prompt),
        )
        (request,) = await chat_requests(serving, prompt, each)
        answer = _head(body, model, each[0].sampling.temperature, each[0].sampling.top_p)
        items = Items(partial(token_logprob, serving))
        turns = serving.turns([request], body.urgency)
        return _Work(body, request, prompt, messages, answer, items, turns, tools or ())

    async def _finish(self, work: _Work) -> None:
        async with aclosing(self._events(work)) as events:
            async for _ in events:
                pass

    async def _in_background(self, work: _Work) -> None:
        try:
            await self._finish(work)
        except ApiError as error:
            work.answer |= {"status": "failed", "error": error.body["error"]}

    async def _stream(self, work: _Work) -> Chunks:
        number = 0
        async with aclosing(self._events(work)) as events:
            async for event in events:
                yield {**event, "sequence_number": number}
                number += 1

    async def _events(self, work: _Work) -> AsyncGenerator[ResponseEvent, None]:
        """The events of a response, whose answer is filled on the way and stored at the end."""
        form = self._serving.form
        assert form is not None
        parser = form.parser(work.body.stop_strings, work.tools, work.prompt)
        output = Output(parser, by_delta=work.body.logprobs)
        items, answer = work.items, work.answer
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": {**answer, "output": []}}
        async with aclosing(work.turns):
            async for turn in work.turns:
                for event in items.take(output.take(turn)):
                    yield event
                if output.finish_reason is not None:
                    break
        whole = output.finish_reason != "length"
        for event in items.close("completed" if whole else "incomplete"):
            yield event
        answer |= {
            "status": "completed" if whole else "incomplete",
            "output": items.items,
            "usage": _usage(work, output),
        }
        if not whole:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        if work.body.store is not False:
            self._store.put(answer, [*work.messages, *messages_of(items.items)])
        yield {"type": f"response.{answer['status']}", "response": answer}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _head(body: ResponseFields, model: str, temperature: float, top_p: float) -> dict[str, Any]:
    """An answer before it has an output."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.effort, "summary": None},
        "store": body.store is not False,
        "temperature": temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(work: _Work, output: Output) -> dict[str, Any]:
    read, made = len(work.request.prompt_ids), len(output.tokens)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": read + made,
    }
