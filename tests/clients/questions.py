"""Questions of the Python clients to the demo model, with their answers.

It imports no module of nanovllm, which the environment of LangChain and LiteLLM does not have.
"""

from __future__ import annotations

from pydantic import BaseModel

SUM, SUM_ANSWER = "What is 17 + 25?", "17 + 25 = 42."
WEATHER, WEATHER_ANSWER = "What is the weather in Oslo?", "It is 7 degrees and rainy in Oslo."
WEATHER_NOW = '{"temperature": 7, "condition": "rainy"}'
EXTRACT = (
    "Extract name, age and city from this text as JSON: "
    "Maria is 34 years old, lives in Lima and works as a doctor."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city to look up."}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int
    city: str


MARIA = Person(name="Maria", age=34, city="Lima")
