"""Runs harness episodes outside the trainer: a fork server, one child for each episode, one JSON line each way.

    trainer: Host.start, Host.advance  ---- control socket ---->  server (server.py): warmed, runs no candidate code
         \\---- one socket for each episode ---->  child: confined, runs harness(task) of one episode

A child is forked from a server that never saw a candidate or an observation, so no state passes between episodes. What
comes back is foreign: `parse` takes a well-formed request or the episode fails. That costs this episode and no other; a
fault of the server is ours and raises RuntimeError.
"""

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import sandbox
from harnesses.contract import Clip
from harnesses.server import ERROR_CHARACTERS, ORDER, STATUS

ROOT = Path(__file__).resolve().parent.parent
LINE_BYTES = 1 << 20  # the longest line a harness may send
VALUES = 20_000  # the most values of one request, keys of objects among them
DEPTH = 32  # of tool schemas and options
STOPS, STOP_CHARACTERS = 16, 200  # the most stop texts of one Ask, and the longest
ROLES = ("system", "user", "assistant", "tool")


# ---- what a harness asks for, as the trainer sees it ----------------------------------------------------------------


@dataclass(frozen=True)
class AskMessage:
    role: str
    content: tuple[str | Clip, ...] = ()  # parts, joined without a separator
    turn: int | None = None  # set: the model's own reply of that turn, as it was sampled


@dataclass(frozen=True)
class AskRequest:
    messages: tuple[AskMessage, ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    tools: list | None


@dataclass(frozen=True)
class ActRequest:
    action: str
    options: dict


@dataclass(frozen=True)
class Ended:
    """The harness returned."""


@dataclass(frozen=True)
class Failed:
    """The harness crashed, hung, exited, was killed or answered nonsense."""

    error: str


Request = AskRequest | ActRequest | Ended | Failed


def parse(line: bytes, replies: int) -> Request:
    """One line of a harness process -> its request. Raises ValueError, saying what is wrong, for anything else."""
    try:
        value = json.loads(line.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_plain(value)
    match value:
        case {"ask": {"messages": list(messages), "max_tokens": limit, "stop": list(stop), "tools": tools}}:
            if limit is not None and not (type(limit) is int and 0 < limit < 1 << 31):
                raise ValueError("max_tokens must be a positive integer or None")
            if len(stop) > STOPS or not all(isinstance(s, str) and 0 < len(s) <= STOP_CHARACTERS for s in stop):
                raise ValueError(f"stop must hold at most {STOPS} texts of 1 to {STOP_CHARACTERS} characters")
            if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
                raise ValueError("tools must be a list of schemas or None")
            return AskRequest(tuple(_message(m, replies) for m in messages), limit, tuple(stop), tools)
        case {"act": {"action": str(action), "options": dict(options)}}:
            return ActRequest(action, options)
        case {"ended": True}:
            return Ended()
        case {"failed": str(error)}:
            return Failed(error[-ERROR_CHARACTERS:])
    raise ValueError("expected Ask(messages, max_tokens, stop, tools) or Act(action, options), each of its type")


def _message(value, replies: int) -> AskMessage:
    match value:
        case {"turn": int(turn)} if type(turn) is int and 0 <= turn < replies:
            return AskMessage("assistant", turn=turn)
        case {"turn": turn}:
            raise ValueError(f"a message stands for reply {str(turn)[:20]}, but there are {replies}")
        case {"role": str(role), "content": list(parts)} if role in ROLES:
            return AskMessage(role, tuple(_part(part) for part in parts))
    raise ValueError(f"a message needs a role of {', '.join(ROLES)} and a content of texts and clips")


def _part(value) -> str | Clip:
    match value:
        case str():
            return value
        case {"text": str(text), "max_tokens": int(limit)} if type(limit) is int and 0 <= limit < 1 << 31:
            return Clip(text, limit)
    raise ValueError("a part of a message must be a text or clip(text, max_tokens)")


def _check_plain(value) -> None:
    """Not too many values, numbers of ordinary size, valid Unicode, no deep nesting: later readers can't stumble."""
    level, count = [value], 0
    for _ in range(DEPTH + 1):
        count += len(level)
        if count > VALUES:
            raise ValueError(f"more than {VALUES} values")
        below = []
        for value in level:
            if isinstance(value, str):
                value.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair
            elif isinstance(value, int | float) and not abs(value) < 1 << 63:
                raise ValueError("a number is not finite or too large")
            elif isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
        level = below
    if level:
        raise ValueError("nested too deeply")


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


# ---- the trainer's side ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Episode:
    """One run of harness(task) in its own process. `close` may be called at any time, and again."""

    number: int
    socket: socket.socket
    host: "Host"
    outbox: bytes  # what is still to be sent; at first the source, the observation and the seed
    inbox: bytearray = field(default_factory=bytearray)
    replies: int = 0  # handed over so far
    confined: bool = False  # its process has said so: what happens from here on is the harness's doing

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.socket.close()
            if not self.host.closed:
                self.host._order(b"K", self.number)


class Host:
    """The fork server and its episodes. Start one for a whole run; it ends with the `with` block or this process.

    step_seconds: wall time from handing a value to the next request. cpu_seconds, memory_bytes: CPU time and address
    space of a whole episode. Raises RuntimeError where the server itself can't start or dies.
    """

    def __init__(self, step_seconds: float = 30.0, cpu_seconds: float = 20.0, memory_bytes: int = 256 << 20):
        self.step_seconds, self.cpu_seconds = step_seconds, cpu_seconds
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one socket for each live episode
        limits = {"memory_bytes": memory_bytes, "cpu_seconds": cpu_seconds, "seccomp": sandbox.protections()["seccomp"]}
        self.started, self.closed = 0, False
        self.control, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from harnesses import server"
        with theirs:
            self.process, self.supervisor = sandbox.spawn(
                [sys.executable, "-S", "-s", "-P", "-B", "-c", f"{start}; server.serve({theirs.fileno()}, {limits})"],
                cwd="/",
                features=sandbox.available(),
                readable=[ROOT / name for name in ("sandbox.py", "harnesses/server.py", "harnesses/contract.py")],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.log,
            )
        self._status()  # ready

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def start(self, source: str, observation: dict, seed: int) -> Episode:
        """A new episode of the harness `source`. Nothing of it runs before the first `advance`."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.started += 1
            self._order(b"S", self.started, theirs.fileno())
        ours.setblocking(False)
        return Episode(self.started, ours, self, _line({"source": source, "observation": observation, "seed": seed}))

    def advance(self, handed: list[tuple[Episode, dict | None]]) -> list[Request]:
        """Hand every episode its value and wait for all of their next requests together -> requests in the same order.

        A value is None to start, {"reply": {"turn", "text", "finish"}} after an Ask, {"result": ...} after an Act.
        An episode that has ended or failed is closed here.
        """
        answers: dict[Episode, Request] = {}
        # many at once share the cores: a busy machine must not fail an honest harness; CPU time is limited apart
        deadline = time.monotonic() + self.step_seconds * max(1.0, len(handed) / (8 * (os.cpu_count() or 1)))
        with selectors.DefaultSelector() as selector:
            for episode, value in handed:
                if value is not None:
                    episode.outbox += _line(value)
                    episode.replies += "reply" in value
                selector.register(episode.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, episode)
            left = self.step_seconds
            while len(answers) < len(handed) and left > 0:
                left = deadline - time.monotonic()  # once it is negative, a last look at what has come meanwhile
                for key, events in selector.select(max(left, 0)):
                    answer = self._exchange(key.data, events)
                    if answer is not None:
                        selector.unregister(key.fileobj)
                        answers[key.data] = answer
                    elif events & selectors.EVENT_WRITE and not key.data.outbox:
                        selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
        for episode, _ in handed:
            answer = answers.setdefault(episode, Failed(f"no answer within {self.step_seconds:g} s"))
            if isinstance(answer, Ended | Failed):
                episode.close()
        return [answers[episode] for episode, _ in handed]

    def _exchange(self, episode: Episode, events: int) -> Request | None:
        """Send and receive what can be without waiting -> the episode's request, once its line is whole."""
        try:
            if events & selectors.EVENT_WRITE and episode.outbox:
                episode.outbox = episode.outbox[episode.socket.send(episode.outbox) :]
            if not events & selectors.EVENT_READ:
                return None
            chunk = episode.socket.recv(1 << 18)
        except (BrokenPipeError, ConnectionResetError):
            chunk = b""
        if not chunk and not episode.confined:
            raise self._died("a process could not be confined")
        if not chunk:
            return Failed(self._why(episode))
        episode.confined = True
        episode.inbox += chunk
        if len(episode.inbox) > LINE_BYTES:
            return Failed(f"sent a line of over {LINE_BYTES} bytes")
        if b"\n" not in chunk:
            return None
        line, episode.inbox = bytes(episode.inbox), bytearray()
        try:
            if line.index(b"\n") != len(line) - 1:
                raise ValueError("more than one line at once")
            return parse(line, episode.replies)
        except ValueError as error:
            return Failed(f"not a request: {error}"[:ERROR_CHARACTERS].encode(errors="replace").decode())

    def _why(self, episode: Episode) -> str:
        """Why a process closed its socket without an answer."""
        self._order(b"W", episode.number)
        code = self._status()
        if code >= 0:
            return f"the harness process exited with code {code} and no answer"
        if -code == signal.SIGXCPU:
            return f"used up its {self.cpu_seconds:g} s of CPU time"
        return f"the harness process was killed by {signal.Signals(-code).name}"

    def _status(self) -> int:
        with contextlib.suppress(ConnectionResetError):
            if answer := self.control.recv(STATUS.size):
                return STATUS.unpack(answer)[0]
        raise self._died()

    def _order(self, what: bytes, number: int, *fds: int) -> None:
        if self.closed:
            raise RuntimeError("the harness host is closed")
        try:
            socket.send_fds(self.control, [ORDER.pack(what, number)], fds)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def _died(self, how: str = "it is gone") -> RuntimeError:
        """Close what is left -> the error to raise, with what the server and its supervisor had to say."""
        verdict = b""
        with contextlib.suppress(OSError):
            self.supervisor.settimeout(1)
            verdict = self.supervisor.recv(4096)
        self.log.seek(0)
        said = (verdict + self.log.read()[-2000:]).decode(errors="replace").strip()
        self.close()
        return RuntimeError(f"the harness host failed, which is not the harness's fault: {how}; {said}")

    def close(self) -> None:
        """End the server and every episode."""
        if self.closed:
            return
        self.closed = True
        self.control.close()
        self.supervisor.close()
        self.process.wait()
        self.log.close()


def _line(value) -> bytes:
    return json.dumps(value).encode() + b"\n"
