"""Creates responses: directly, as a stream of named events, or in the background."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from specbuild.runtime.request import Request
from specbuild.runtime.serve.chat import available_tools, chat_prompt, chat_requests
from specbuild.runtime.serve.errors import ApiError
from specbuild.runtime.serve.event_stream import EventSource, EventStream, json_bytes
from specbuild.runtime.serve.messages import template_messages
from specbuild.runtime.serve.output import Output
from specbuild.runtime.serve.parsers.arguments import Tools
from specbuild.runtime.serve.parsers.parser import ChatPrompt
from specbuild.runtime.serve.responses.fields import ResponseFields, messages_of
from specbuild.runtime.serve.responses.items import Items, ResponseEvent
from specbuild.runtime.serve.responses.store import MAX_RESPONSE_BYTES, ResponseStore
from specbuild.runtime.serve.serving import Serving
from specbuild.runtime.serve.structured import output_constraint
from specbuild.runtime.serve.token_batches import TokenBatch, TokenBatches
from specbuild.runtime.serve.token_logprobs import TokenTexts
from specbuild.runtime.text.stream import StopRule

log = logging.getLogger("specbuild.serve")


@dataclass
class _ResponseWork:
    """A response in progress."""

    body: ResponseFields
    request: Request
    prompt: ChatPrompt
    messages: Sequence[Mapping[str, Any]]
    answer: dict[str, Any]
    items: Items
    batches: TokenBatches
    tools: Tools


@dataclass
class _BackgroundJob:
    """A background response in progress. If ``is_deleted``, its result is not stored."""

    work: _ResponseWork
    is_deleted: bool = False
    task: asyncio.Task[None] = field(init=False)

    async def stop(self) -> None:
        """Cancel the task, which aborts the decoding, and wait until it has ended."""
        self.task.cancel()
        await asyncio.wait({self.task})


class Responses:
    """Handles responses and stores them."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore()
        # Each job has an open sequence, so the limit of the queue also limits the number of jobs.
        self._background: dict[str, _BackgroundJob] = {}

    async def answer(self, body: ResponseFields) -> Mapping[str, Any] | EventStream:
        """Return a complete response, the events of a stream, or a response in progress."""
        work = await self._begin(body)
        if body.stream:
            return self._stream(work)
        if body.background:
            job = _BackgroundJob(work)
            job.task = asyncio.create_task(self._run_in_background(job))
            self._background[work.answer["id"]] = job
            # As OpenAI's: it is in progress when it is read for the first time.
            return {**work.answer, "status": "queued"}
        await self._finish(work)
        return work.answer

    def retrieve(self, name: str) -> bytes:
        """Return a response as JSON. If it is in progress, it has the output so far."""
        job = self._job(name)
        if job is not None:
            return json_bytes({**job.work.answer, "output": job.work.items.items})
        return self._store.get(name).answer

    def input_items(self, name: str) -> Mapping[str, Any]:
        """Return the items of a response's input, without those of earlier responses."""
        job = self._job(name)
        items: list[Any]
        if job is not None:
            items = job.work.body.input_items(name)
        else:
            items = from_json(self._store.get(name).inputs)
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        ids = {"first_id": first, "last_id": last}
        return {"object": "list", "data": items, "has_more": False, **ids}

    async def delete(self, name: str) -> Mapping[str, Any]:
        """Delete a response. One in progress is aborted."""
        job = self._job(name)
        if job is None:
            self._store.delete(name)
        else:
            job.is_deleted = True
            await job.stop()
        return {"id": name, "object": "response", "deleted": True}

    async def cancel(self, name: str) -> bytes:
        """Abort a background response, which keeps its output so far. Return it as JSON."""
        job = self._job(name)
        if job is not None:
            await job.stop()
        response = self._store.get(name)
        if not response.is_background:
            raise ApiError(400, "only background responses can be cancelled")
        return response.answer

    async def close(self) -> None:
        """Abort all background responses, since they cannot be retrieved after shutdown."""
        await asyncio.gather(*(job.stop() for job in self._background.values()))

    def _job(self, name: str) -> _BackgroundJob | None:
        """Return the job of a background response in progress, unless it was deleted."""
        job = self._background.get(name)
        return None if job is None or job.is_deleted else job

    async def _begin(self, body: ResponseFields) -> _ResponseWork:
        serving = self._serving
        model = serving.model(body.model)
        body.check()
        previous: Sequence[Mapping[str, Any]] = ()
        if body.previous_response_id is not None:
            previous = self._store.get(body.previous_response_id).messages()
        messages = [*previous, *body.messages()]
        instructions = [] if body.instructions is None else [_system_message(body.instructions)]
        tools = available_tools(serving, body.tools, body.tool_choice)
        num_top_logprobs = None
        if body.logprobs:
            num_top_logprobs = serving.top_logprobs("top_logprobs", body.top_logprobs)
        constraint = output_constraint(
            body.guide(), tools, body.tool_choice, parallel=body.parallel_tool_calls
        )
        answer = _initial_answer(body, model)
        if body.store is not False:
            self._store.check(answer, messages, body.input_items(answer["id"]))
        chat = template_messages([*instructions, *messages])
        serving.service.check_admission(1)
        prompt = await chat_prompt(serving, chat, tools, body.template_variables)
        choice_params = body.params(
            defaults=serving.service.engine.generation_defaults,
            max_tokens=body.max_output_tokens,
            with_text=False,
            num_top_logprobs=num_top_logprobs,
            guide=await serving.guide(constraint, prompt),
            reasoning_budget=serving.reasoning_budget(body.thinking_token_budget, prompt),
        )
        may_shorten = body.max_output_tokens is None
        (request,) = await chat_requests(serving, prompt, choice_params, may_shorten=may_shorten)
        sampling = choice_params[0].sampling
        answer |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        texts = TokenTexts(serving, as_ids=bool(body.return_tokens_as_token_ids))
        items = Items(texts.token_logprob)
        batches = serving.start([request], body.urgency)
        return _ResponseWork(body, request, prompt, messages, answer, items, batches, tools or ())

    def _stream(self, work: _ResponseWork) -> EventStream:
        """Return the events of a response. They complete its answer, which is stored at the end."""
        return EventStream(
            work.batches, _ResponseEvents(work, self._output(work), self._store_response)
        )

    async def _finish(self, work: _ResponseWork) -> None:
        async with aclosing(self._stream(work).chunks()) as events:
            async for _ in events:
                pass

    async def _run_in_background(self, job: _BackgroundJob) -> None:
        """Create a response and store its final state, unless it was deleted meanwhile."""
        work = job.work
        try:
            await self._finish(work)
            return
        except asyncio.CancelledError:
            # Only stop() cancels the task, and waits until it has ended.
            final_fields: dict[str, Any] = {"status": "cancelled"}
        except ApiError as error:
            final_fields = {"status": "failed", "error": error.body["error"]}
        except Exception:
            log.exception("the response %s failed", work.answer["id"])
            internal_error = ApiError(500, "internal error; the server's log has it")
            final_fields = {"status": "failed", "error": internal_error.body["error"]}
        finally:
            del self._background[work.answer["id"]]
        if job.is_deleted:
            return
        for _ in work.items.close("incomplete"):
            pass
        work.answer |= final_fields | {"output": work.items.items}
        self._store_response(work, work.messages)

    def _store_response(self, work: _ResponseWork, messages: Sequence[Mapping[str, Any]]) -> None:
        """Store a response if requested. If it is too large, its ``store`` becomes false."""
        answer = work.answer
        inputs = work.body.input_items(answer["id"])
        if work.body.store is False or self._store.put(answer, messages, inputs):
            return
        answer["store"] = False
        if not work.body.background:
            return
        message = (
            f"the response is larger than the {MAX_RESPONSE_BYTES >> 20} MiB that are stored; "
            "leave log-probabilities out, or stream it"
        )
        error = ApiError(500, message, code="response_too_large").body["error"]
        answer |= {"status": "failed", "error": error, "output": []}
        self._store.put(answer, [])

    def _output(self, work: _ResponseWork) -> Output:
        output_format_, body = self._serving.output_format, work.body
        assert output_format_ is not None
        params = work.request.params
        rule = StopRule(body.stop_strings, include=params.include_stop_str_in_output)
        parser = output_format_.parser(
            rule, work.tools, work.prompt, skip_special_tokens=params.skip_special_tokens
        )
        return Output(
            parser,
            tracks_tokens=body.logprobs,
            hidden_end_tokens=self._serving.hidden_end_tokens(params),
            single_call=body.parallel_tool_calls is False,
        )


class _ResponseEvents(EventSource):
    """The events of a response."""

    has_types = True

    def __init__(
        self,
        work: _ResponseWork,
        output: Output,
        store: Callable[[_ResponseWork, Sequence[Mapping[str, Any]]], None],
    ) -> None:
        self._work = work
        self._output = output
        self._store = store
        self._num_events = 0

    @property
    def has_ended(self) -> bool:
        """Whether a stop string ended the output."""
        return self._output.finish_reason is not None

    def begin(self) -> Iterator[Mapping[str, Any]]:
        """Yield the start of the response."""
        for name in ("created", "in_progress"):
            response = {**self._work.answer, "output": []}
            yield self._numbered({"type": f"response.{name}", "response": response})

    def add(self, batch: TokenBatch) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a batch."""
        yield from map(self._numbered, self._work.items.add(self._output.add(batch)))

    def end(self) -> Iterator[Mapping[str, Any]]:
        """Yield the end of the response, and store it."""
        work, output, items, answer = self._work, self._output, self._work.items, self._work.answer
        is_complete = output.finish_reason != "length"
        yield from map(self._numbered, items.close("completed" if is_complete else "incomplete"))
        answer |= {
            "status": "completed" if is_complete else "incomplete",
            "output": items.items,
            "usage": _usage(work, output),
        }
        if not is_complete:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        self._store(work, [*work.messages, *messages_of(items.items)])
        yield self._numbered({"type": f"response.{answer['status']}", "response": answer})

    def _numbered(self, event: ResponseEvent) -> Mapping[str, Any]:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}


def _system_message(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _initial_answer(body: ResponseFields, model: str) -> dict[str, Any]:
    """Return the answer of a response without output."""
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
        "text": {"format": body.text_format},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(work: _ResponseWork, output: Output) -> dict[str, Any]:
    input_tokens, output_tokens = len(work.request.prompt_ids), len(output.tokens)
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": input_tokens + output_tokens,
    }
