"""OpenAI's agents against a server, by chats and by responses: ``python agents_client.py URL``."""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

KEY, MODEL = "secret", "toy"
GREETING = 'Hello, <b>you</b> & "all".'


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        agent = Agent(name="toy", instructions="Be kind.", model=model, tools=[get_weather])
        for said, answer in (
            ("hi", GREETING),
            ("think", GREETING),
            ("weather?", "The tool said: rain in Oslo"),
        ):
            whole = await Runner.run(agent, said)
            assert whole.final_output == answer, (kind, said, whole.final_output)
            streamed = Runner.run_streamed(agent, said)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == answer, (kind, said, streamed.final_output)
        again = await Runner.run(agent, [*whole.to_input_list(), {"role": "user", "content": "hi"}])
        assert again.final_output == GREETING, (kind, again.final_output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
