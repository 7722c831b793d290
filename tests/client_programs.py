"""Client programs that agents are built on, against a server: `python client_programs.py URL`.

Runs in an environment of its own (`make clients`), since some of them want an older `openai`.
"""

from __future__ import annotations

import sys
from typing import Any

import instructor
import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


ASK: list[Any] = [{"role": "user", "content": "What will the weather be in Oslo, for two days?"}]
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "seed": 0}


def with_instructor(url: str) -> None:
    """Its TOOLS mode names the function that must be called, and reads a call as it comes."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.TOOLS
    )
    made: Any = client.chat.completions.create(
        model="default", messages=ASK, response_model=Weather, max_retries=0, **SETTINGS
    )
    assert isinstance(made, Weather)
    *_, last = client.chat.completions.create_partial(
        model="default", messages=ASK, response_model=Weather, max_retries=0, **SETTINGS
    )
    assert last.model_dump() == made.model_dump()


def with_langchain(url: str) -> None:
    """`bind_tools`, a stream of a call, and the call's result sent back."""
    model = ChatOpenAI(base_url=url, api_key="none", model="default", **SETTINGS)  # type: ignore[arg-type]
    bound = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    asked = HumanMessage(ASK[0]["content"])
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    Weather.model_validate(call["args"])
    parts = list(bound.stream([asked]))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(call["name"], call["args"])]
    result = ToolMessage("rain", tool_call_id=call["id"])
    free = model.bind_tools([Weather]).invoke([asked, answer, result])
    assert free.content or free.tool_calls
    assert isinstance(model.with_structured_output(Weather).invoke([asked]), Weather)


def with_litellm(url: str) -> None:
    """Tools by way of its own types."""
    function = {"name": "Weather", "parameters": Weather.model_json_schema()}
    answer: Any = litellm.completion(
        model="openai/default",
        api_base=url,
        api_key="none",
        messages=ASK,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        **SETTINGS,
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    again: Any = litellm.completion(
        model="openai/default",
        api_base=url,
        api_key="none",
        messages=[*ASK, message.model_dump(), result],
        **SETTINGS,
    )
    assert again.choices[0].message.content is not None


if __name__ == "__main__":
    for program in (with_instructor, with_langchain, with_litellm):
        program(f"{sys.argv[1]}/v1")
        print(program.__name__)
