"""OpenAI's own client against a server: ``python openai_client.py URL``. Major versions 2 and 3."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import urllib.request

import openai

KEY, MODEL = "secret", "toy"
GREETING = 'Hello, <b>you</b> & "all".'
THOUGHT = "The user greets me."
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def user(text):
    return {"role": "user", "content": text}


def chats(client):
    plain = client.chat.completions.create(model=MODEL, messages=[user("hi")], seed=1)
    assert plain.choices[0].message.content == GREETING
    assert plain.choices[0].finish_reason == "stop"
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    thought = client.chat.completions.create(
        model=MODEL, messages=[user("think")], reasoning_effort="minimal", max_completion_tokens=300
    )
    message = thought.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == (
        GREETING,
        THOUGHT,
        THOUGHT,
    )
    assert thought.usage.completion_tokens_details.reasoning_tokens > 0
    short = client.chat.completions.create(model=MODEL, messages=[user("hi")], max_tokens=9)
    assert short.choices[0].finish_reason == "length"


def streams(client):
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=[user("think")], stream=True, stream_options=options
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "stop"
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == GREETING
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == THOUGHT
    with client.chat.completions.stream(model=MODEL, messages=[user("hi")]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == GREETING


def tools(client):
    given = {"model": MODEL, "tools": [{"type": "function", "function": WEATHER}]}
    messages = [user("weather?")]
    called = client.chat.completions.create(**given, messages=messages)
    assert called.choices[0].finish_reason == "tool_calls"
    message = called.choices[0].message
    assert message.content is None
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    done = client.chat.completions.create(**given, messages=messages)
    assert done.choices[0].message.content == "The tool said: rain"
    chunks = list(client.chat.completions.create(**given, messages=[user("weather?")], stream=True))
    pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert all(isinstance(piece.function.arguments, str) for piece in pieces)
    assert pieces[0].id and pieces[0].function.name == "get_weather"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**given, messages=[user("weather?")]) as stream:
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)["city"] == "Oslo"


def responses(client):
    made = client.responses.create(model=MODEL, input="think", instructions="Be kind.")
    assert (made.status, made.output_text) == ("completed", GREETING)
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.output[0].content[0].text == THOUGHT
    again = client.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
    assert client.responses.retrieve(again.id).output_text == GREETING
    client.responses.delete(again.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(again.id))
    events = list(client.responses.create(model=MODEL, input="think", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    with client.responses.stream(model=MODEL, input="think") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == GREETING
    given = {"model": MODEL, "tools": [{"type": "function", "strict": False, **WEATHER}]}
    called = client.responses.create(**given, input="weather?")
    call = called.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Oslo"},
    )
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    done = client.responses.create(**given, input=[result], previous_response_id=called.id)
    assert done.output_text == "The tool said: rain"
    history = [user("weather?"), *(item.model_dump(exclude_none=True) for item in called.output)]
    done = client.responses.create(**given, input=[*history, result], store=False)
    assert done.output_text == "The tool said: rain"


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def errors(client):
    def ask(**fields):
        return client.chat.completions.create(**{"model": MODEL, "messages": [user("hi")]} | fields)

    error = refused(openai.BadRequestError, lambda: ask(temperature=-1))
    assert error.param == "temperature" and "temperature" in error.message
    assert refused(openai.NotFoundError, lambda: ask(model="other")).code == "model_not_found"
    error = refused(openai.BadRequestError, lambda: ask(messages=[user("x" * 3000)]))
    assert error.code == "context_length_exceeded"
    stranger = client.with_options(api_key="wrong")
    assert refused(openai.AuthenticationError, stranger.models.list).code == "invalid_api_key"
    assert next(model.id for model in client.models.list()) == MODEL
    assert client.completions.create(model=MODEL, prompt="hi", max_tokens=40).choices[0].text


def waits(client, load):
    """A client that gives up leaves; one that finds the server full comes again."""
    hasty = client.with_options(timeout=0.3, max_retries=0)

    def ask(asker):
        return asker.chat.completions.create(model=MODEL, messages=[user("slow")])

    refused(openai.APITimeoutError, lambda: ask(hasty))
    end_s = time.monotonic() + 120
    while load():
        assert time.monotonic() < end_s, "the server goes on for a client that left"
        time.sleep(0.02)
    others = [threading.Thread(target=ask, args=(client,)) for _ in range(3)]
    for other in others:
        other.start()
    while load() < 3:
        time.sleep(0.01)
    error = refused(openai.RateLimitError, lambda: ask(client.with_options(max_retries=0)))
    assert error.response.headers["retry-after"] == "1" and error.code == "queue_full"
    answer = ask(client.with_options(max_retries=4))
    assert answer.choices[0].message.content == GREETING
    for other in others:
        other.join()


async def asynchronously(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        async with await client.chat.completions.create(
            model=MODEL, messages=[user("slow")], stream=True
        ) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        asked = [
            client.chat.completions.create(model=MODEL, messages=[user("hi")]) for _ in range(2)
        ]
        answers = await asyncio.gather(*asked)
    assert [answer.choices[0].message.content for answer in answers] == [GREETING] * 2


def main(url):
    def load():
        with urllib.request.urlopen(f"{url}/load") as answer:
            return json.load(answer)["server_load"]

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        for check in (chats, streams, tools, responses, errors):
            check(client)
        waits(client, load)
    asyncio.run(asynchronously(url))


if __name__ == "__main__":
    main(sys.argv[1])
