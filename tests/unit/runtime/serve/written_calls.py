"""Tool calls as the chat templates of several families write them.

These are DeepSeek-V3 and V3.1, Kimi-K2, GLM-4.7, Qwen3, Qwen3-Coder, MiniMax-M2, Mistral and Gemma
4.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def deepseek(calls: Sequence[Call], body: str) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{body.format(name=name, arguments=json.dumps(arguments))}"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def kimi2(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def glm47(calls: Sequence[Call], gap: str = "") -> str:
    """Write calls of GLM-4.7. With ``gap`` lines end as in GLM-4.5."""

    def value(argument: Any) -> str:
        return argument if isinstance(argument, str) else json.dumps(argument)

    def pairs(arguments: dict[str, Any]) -> str:
        return "".join(
            f"{gap}<arg_key>{k}</arg_key>{gap}<arg_value>{value(v)}</arg_value>"
            for k, v in arguments.items()
        )

    return "".join(f"<tool_call>{name}{pairs(a)}{gap}</tool_call>" for name, a in calls)


def hermes(calls: Sequence[Call]) -> str:
    written = [json.dumps({"name": name, "arguments": a}, ensure_ascii=False) for name, a in calls]
    return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def qwen3_coder(calls: Sequence[Call]) -> str:
    def parameter(name: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<parameter={name}>\n{text}\n</parameter>\n"

    return "".join(
        f"<tool_call>\n<function={name}>\n"
        f"{''.join(parameter(k, v) for k, v in arguments.items())}</function>\n</tool_call>"
        for name, arguments in calls
    )


def minimax(calls: Sequence[Call]) -> str:
    def parameter(name: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return f'<parameter name="{name}">{text}</parameter>\n'

    written = [
        f'<invoke name="{name}">\n{"".join(parameter(k, v) for k, v in asked.items())}</invoke>\n'
        for name, asked in calls
    ]
    return f"<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>"


def mistral(calls: Sequence[Call], written_id: str = "") -> str:
    return "".join(
        f"[TOOL_CALLS]{name}{written_id}[ARGS]{json.dumps(arguments)}" for name, arguments in calls
    )


def old_mistral(calls: Sequence[Call]) -> str:
    """Write calls of Mistral before v7: one list of all calls."""
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls])


def gemma4(calls: Sequence[Call]) -> str:
    def value(value_of_argument: Any) -> str:
        if isinstance(value_of_argument, str):
            return f'<|"|>{value_of_argument}<|"|>'
        if isinstance(value_of_argument, dict):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in value_of_argument.items()) + "}"
        if isinstance(value_of_argument, list):
            return "[" + ",".join(map(value, value_of_argument)) + "]"
        return json.dumps(value_of_argument)

    return "".join(f"<|tool_call>call:{name}{value(asked)}<tool_call|>" for name, asked in calls)


V3 = "function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
V31 = "{name}<｜tool▁sep｜>{arguments}"
WRITERS = {
    "deepseek3": lambda calls: deepseek(calls, V3),
    "deepseek31": lambda calls: deepseek(calls, V31),
    "kimi2": kimi2,
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm47": glm47,
    "glm47, lines": lambda calls: glm47(calls, "\n"),
    "minimax": minimax,
    "mistral": mistral,
    "mistral, ids": lambda calls: mistral(calls, "[CALL_ID]a1B2c3D4e"),
    "mistral, list": old_mistral,
    "gemma4": gemma4,
}
