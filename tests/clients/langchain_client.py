"""LangChain against a server, over chats and over responses: ``python langchain_client.py URL``."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

KEY, MODEL = "secret", "toy"
GREETING = 'Hello, <b>you</b> & "all".'


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def main(url: str) -> None:
    given = {"base_url": f"{url}/v1", "api_key": KEY, "model": MODEL}
    for responses in (False, True):
        chat = ChatOpenAI(**given, use_responses_api=responses, temperature=0, stream_usage=True)
        said = chat.invoke([SystemMessage("Be kind."), HumanMessage("think")])
        assert said.text == GREETING, said
        assert said.usage_metadata["output_tokens"] > 0
        pieces = list(chat.stream("think"))
        assert "".join(piece.text for piece in pieces) == GREETING, pieces
        assert [m.text for m in chat.batch(["hi", "think"])] == [GREETING] * 2
        able = chat.bind_tools([get_weather])
        messages = [HumanMessage("weather?")]
        called = able.invoke(messages)
        (call,) = called.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
        result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        done = able.invoke([*messages, called, result])
        assert done.text == "The tool said: rain in Oslo", done
        whole = None
        for piece in able.stream(messages):
            whole = piece if whole is None else whole + piece
        assert whole is not None and whole.tool_calls[0]["args"] == {"city": "Oslo"}
    assert OpenAI(**given, max_tokens=40).invoke("hi")


if __name__ == "__main__":
    main(sys.argv[1])
