"""The records that flow between the modules. Frozen, plain, and nothing else lives here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the harness returned: the last reply is the answer
    ENVIRONMENT = "environment"  # the environment ended it (chess: solved, or a wrong legal move)
    TURNS = "turns"  # the domain's limit of assistant turns
    LENGTH = "length"  # the response budget (sampled plus inserted tokens) is used up
    RETRIES = "retries"  # more retries than the domain allows
    PROMPT = "prompt_too_long"  # the first prompt is over the prompt limit; never cut
    SUBSTITUTED = "substituted"  # the harness acted on something that the model never wrote
    HARNESS = "harness_error"  # the harness crashed, hung, exited or answered nonsense


@dataclass(frozen=True)
class Task:
    """One x of a dataset. `observation` is all that a harness sees; `reference` never leaves this process."""

    id: str
    benchmark: str
    observation: Mapping[str, Any]  # JSON-able
    reference: Any


@dataclass(frozen=True)
class Message:
    """One message of a context. With `turn` set it is the model's own reply of that turn, sampled ids and all."""

    role: str
    content: str = ""
    turn: int | None = None


@dataclass(frozen=True)
class Turn:
    """One assistant turn: exactly the ids that the model saw and the ids that it sampled."""

    context_ids: tuple[int, ...]  # (context,)
    sampled_ids: tuple[int, ...]  # (sampled,) with the end token, if the model wrote one
    logprobs: tuple[float, ...]  # (sampled,) natural log, of the whole softmax at the sampling temperature
    text: str  # the sampled ids decoded, without the end token
    finish: str  # "stop" or "length"
    context_text: str = ""  # the rendered context, replies as markers: what Policy.encode compares


@dataclass(frozen=True)
class Trajectory:
    """tau: one rollout of (theta, h) on one task."""

    task_id: str
    benchmark: str
    sample: int  # which of the n rollouts of this task
    seed: int
    reward: int  # R(x, tau), 0 or 1
    stop: StopReason
    turns: tuple[Turn, ...]
    inserted_tokens: int = 0  # tokens after the first prompt that the model did not sample
    behaviour: Mapping[str, Any] = field(default_factory=dict)  # for tables; `reference` stays out of archives
    error: str = ""  # why, when stop is HARNESS, PROMPT or SUBSTITUTED
    seconds: float = 0.0
    harness: str = ""  # h, by the name that check.name_of gives it

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)


@dataclass(frozen=True)
class Candidate:
    """One harness that a proposer wrote."""

    source: str
    proposer: str  # which backend wrote it
    hypothesis: str  # why it should help, in words
    parent: str | None  # id of the archive entry that it edits


@dataclass(frozen=True)
class Artifact:
    """e_h: what evaluating a harness leaves (Section 3.2)."""

    score: float  # Eq. 3
    standard_error: float
    trajectories: tuple[Trajectory, ...]

    @property
    def outcomes(self) -> dict[str, float]:
        """Task id -> mean reward of its rollouts."""
        rewards: dict[str, list[int]] = {}
        for trajectory in self.trajectories:
            rewards.setdefault(trajectory.task_id, []).append(trajectory.reward)
        return {task_id: sum(r) / len(r) for task_id, r in rewards.items()}
