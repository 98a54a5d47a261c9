"""tau ~ pi(theta, h): drives all live episodes together, from the first prompt to the reward.

The rules that no harness can change are kept here: the turn limit, the prompt limit (first prompt only), the response
budget, at most one Act for each Ask. The reward is computed here, in this process, after the episode.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from data_types import Message, StopReason, Task, Trajectory, Turn
from harnesses import check
from harnesses.host import ActRequest, AskRequest, Ended, Failed
from model import TemplateError
from sampler import Request

MAX_LIVE = 1024  # episodes driven at one time; each is a small process


@dataclass(frozen=True)
class Plan:
    """One rollout to make: `sample` tells apart the rollouts of one harness on one task."""

    source: str
    task: Task
    sample: int
    seed: int


@dataclass(frozen=True)
class Limits:
    prompt: int  # tokens of the first prompt
    response: int  # tokens after it in a whole trajectory, sampled plus inserted (Table 1: response length)


def seed_of(*names) -> int:
    """63 bits that depend on the names alone, never on the order of draws."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "big") >> 1


def plans(source: str, tasks: Sequence[Task], n: int, *names) -> list[Plan]:
    """n rollouts of each task, with seeds named by `names`, the task and the sample. A task that is there twice (in a
    batch that crosses two epochs) goes on counting its samples."""
    taken: Counter[str] = Counter()
    todo = []
    for task in tasks:
        for _ in range(n):
            sample = taken[task.id]
            taken[task.id] += 1
            todo.append(Plan(source, task, sample, seed_of(*names, task.id, sample)))
    return todo


def rollout(policy, host, domain, todo: Sequence[Plan], limits: Limits, progress=None) -> list[Trajectory]:
    """-> one trajectory for each plan, in order. `progress(trajectory)` is called as each one ends."""
    done: list[Trajectory] = []
    for start in range(0, len(todo), MAX_LIVE):
        live = [Episode(plan, domain, limits, host) for plan in todo[start : start + MAX_LIVE]]
        try:
            drive(policy, host, live, limits, progress)
        finally:
            for episode in live:
                episode.process.close()
        done += [episode.trajectory for episode in live]
    return done


def drive(policy, host, live, limits: Limits, progress) -> None:
    """Sample for the episodes that ask; as replies come, hand them on and see what each episode asks next."""

    def go_on(handed):
        asking = advance(policy, host, handed)
        for episode, _ in handed:
            if progress and episode.trajectory:
                progress(episode.trajectory)
        return asking

    def answer(found):
        return go_on([(episode, episode.reply(policy, sample)) for episode, sample in found])

    policy.converse(go_on([(episode, None) for episode in live]), answer, limits.prompt + limits.response)


def advance(policy, host, handed) -> list[tuple["Episode", Request]]:
    """Hand every episode what it waits for, and act for it, until it asks or ends -> those that ask, and what."""
    asking = []
    while handed:
        requests = host.advance([(episode.process, value) for episode, value in handed])
        acted = []
        for (episode, _), request in zip(handed, requests, strict=True):
            match request:
                case AskRequest():
                    if asked := episode.ask(policy, request):
                        asking.append((episode, asked))
                case ActRequest():
                    if (result := episode.act(request)) is not None:
                        acted.append((episode, result))
                case Ended():
                    episode.end(StopReason.DONE)
                case Failed():
                    episode.end(StopReason.HARNESS, request.error)
        handed = acted
    return asking


@dataclass(eq=False)
class Episode:
    """One rollout while it runs."""

    plan: Plan
    domain: object
    limits: Limits
    host: object
    turns: list[Turn] = field(default_factory=list)
    inserted: int = 0  # tokens after the first prompt that the model did not sample
    acts: int = 0
    trajectory: Trajectory | None = None

    def __post_init__(self):
        self.started = time.monotonic()
        self.environment = self.domain.Environment(self.plan.task)
        self.process = self.host.start(self.plan.source, self.environment.observation(), self.plan.seed)

    def ask(self, policy, request: AskRequest) -> Request | None:
        """The harness asks for an assistant turn -> what to sample, or None if that ends the episode."""
        if len(self.turns) >= self.domain.TURN_LIMIT:
            return self.end(StopReason.TURNS)
        if reason := self.environment.on_ask():
            return self.end(reason)
        try:
            messages = [self._message(policy, message) for message in request.messages]
            context, text = policy.encode(messages, self.turns, request.tools)
        except TemplateError as error:
            return self.end(StopReason.HARNESS, str(error))
        if not self.turns and len(context) > self.limits.prompt:
            return self.end(StopReason.PROMPT, f"{len(context)} tokens, at most {self.limits.prompt} are allowed")
        self.inserted += self._newly_inserted(context)
        left = self.limits.response - self.inserted - sum(len(turn.sampled_ids) for turn in self.turns)
        if left <= 0 or len(context) >= self.limits.prompt + self.limits.response:
            return self.end(StopReason.LENGTH)
        self.context_text = text
        tokens = min(left, request.max_tokens or left)
        self.asked = Request(context, seed_of(self.plan.seed, len(self.turns)), tokens, request.stop)
        return self.asked

    def _message(self, policy, message) -> Message:
        """Cuts by tokens happen here: the harness has no tokenizer."""
        if message.turn is not None:
            return Message("assistant", turn=message.turn)
        parts = [p if isinstance(p, str) else policy.clip(p.text, p.max_tokens) for p in message.content]
        return Message(message.role, "".join(parts))

    def _newly_inserted(self, context) -> int:
        """Tokens of this context past what the model saw and wrote at the turn before."""
        if not self.turns:
            return 0
        before = self.turns[-1].context_ids + self.turns[-1].sampled_ids
        return len(context) - next((i for i, (a, b) in enumerate(zip(before, context, strict=False)) if a != b),
                                   min(len(before), len(context)))  # fmt: skip

    def reply(self, policy, sample) -> dict:
        sample = policy.cut(self.asked, sample)
        text = policy.decode(sample.ids)
        ids, logprobs = tuple(sample.ids), tuple(sample.logprobs)
        self.turns.append(Turn(self.asked.context, ids, logprobs, text, sample.finish, self.context_text))
        self.environment.on_reply(text)
        return {"reply": {"turn": len(self.turns) - 1, "text": text, "finish": sample.finish}}

    def act(self, request: ActRequest) -> dict | None:
        """The harness acts -> the environment's result, or None if that ends the episode."""
        if self.acts >= len(self.turns):
            return self.end(StopReason.HARNESS, "Act without a new Ask: at most one Act for each Ask, after it")
        self.acts = len(self.turns)
        result = self.environment.act(request.action, request.options)
        return self.end(self.environment.ended) if self.environment.ended else {"result": result}

    def end(self, stop: StopReason, error: str = "") -> None:
        """R reads the environment and the last sampled reply, never prompt or tool text."""
        failed = stop in (StopReason.HARNESS, StopReason.PROMPT, StopReason.SUBSTITUTED)
        last = self.turns[-1].text if self.turns else ""
        self.trajectory = Trajectory(
            task_id=self.plan.task.id,
            benchmark=self.plan.task.benchmark,
            sample=self.plan.sample,
            seed=self.plan.seed,
            reward=0 if failed else self.environment.reward(last),
            stop=stop,
            turns=tuple(self.turns),
            inserted_tokens=self.inserted,
            behaviour=self.environment.behaviour(),
            error=error,
            seconds=time.monotonic() - self.started,
            harness=check.name_of(self.plan.source),
        )
        self.process.close()
