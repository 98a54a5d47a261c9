"""What a harness may say and what it gets back. Standard library only: it is all that a harness process imports.

A harness is one Python file with plain string literals `SYSTEM_PROMPT` and `USER_PROMPT` and one generator function
`harness(task)`. It yields `Ask(messages)` and is handed a `Reply`, or yields `Act(action)` and is handed the
environment's result. Returning ends the episode; the last reply is the answer. It never holds the model, the verifier,
the reference or a file.
"""

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

# What a harness file may import: string work and arithmetic, nothing that reaches outside the process.
IMPORTS = ("harnesses.contract", "collections", "dataclasses", "functools", "itertools", "json", "math", "random", "re",
           "string", "textwrap", "typing")  # fmt: skip


@dataclass(frozen=True)
class Clip:
    """Text cut to its first `max_tokens` tokens by the model's tokenizer, which only the parent has."""

    text: str
    max_tokens: int


@dataclass(frozen=True)
class Message:
    role: str
    content: Any  # a str, a Clip, or a list of both, joined without a separator


@dataclass(frozen=True)
class Reply:
    """One assistant turn. Put into `messages` as it is, it stands for the very tokens that were sampled."""

    turn: int
    text: str
    finish: str  # "stop": the model ended its turn; "length": it was cut off
    role: str = "assistant"


@dataclass(frozen=True)
class Ask:
    """One assistant turn of the model on these messages -> Reply. `max_tokens` is cut to what is left of the budget."""

    messages: list
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # the turn ends after the first of these; at most 16, of 200 characters
    tools: list | None = None  # tool schemas for the chat template


@dataclass(frozen=True)
class Act:
    """One step of the environment -> its result. At most one for each Ask, and only after an Ask."""

    action: str
    options: dict = field(default_factory=dict)


def system(content) -> Message:
    return Message("system", content)


def user(content) -> Message:
    return Message("user", content)


def assistant(content) -> Message:
    return Message("assistant", content)


def tool(content) -> Message:
    return Message("tool", content)


def clip(text: str, max_tokens: int) -> Clip:
    return Clip(text, max_tokens)


def fill(template: str, **values) -> str:
    """Replace each {name} by its value in one pass; other braces, and braces in values, stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1], m[0])), template)


def record(value):
    """JSON objects as attributes: result["legal"][0]["san"] -> result.legal[0].san."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: record(item) for key, item in value.items()})
    return [record(item) for item in value] if isinstance(value, list) else value
