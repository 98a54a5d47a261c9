"""The harness host's own process: a warmed fork server, and in each of its children one confined episode.

Standard library, `sandbox` and `contract` only: nothing of a run is in this process, and none is ever handed over.
"""

import builtins
import contextlib
import gc
import importlib
import json
import linecache
import os
import random
import signal
import socket
import struct
import sys
import traceback
import types

import sandbox
from harnesses import contract

ORDER = struct.Struct("!cQ")  # what the trainer tells the server: b"S"tart, b"K"ill or b"W"hy, and the episode's number
STATUS = struct.Struct("!i")  # the answer to b"W": the exit code; 0 once at the start: ready
ERROR_CHARACTERS = 4000


def send(fd: int, value: dict) -> None:
    """One JSON line."""
    line = memoryview(json.dumps(value).encode() + b"\n")
    while line:
        line = line[os.write(fd, line) :]


def serve(control: int, limits: dict) -> None:
    """Fork a child for each b"S" with the socket that comes along; never run foreign code here."""
    warm(limits["seccomp"])
    pids: dict[int, int] = {}
    with socket.socket(fileno=control) as orders:
        orders.sendall(STATUS.pack(0))
        while True:
            order, fds, _, _ = socket.recv_fds(orders, ORDER.size, 1)
            if not order:  # the trainer is gone
                break
            what, number = ORDER.unpack(order)
            if what == b"S":
                pids[number] = os.fork()
                if pids[number] == 0:
                    play(fds[0], limits)
                os.close(fds[0])
            elif number in pids:
                os.kill(pids[number], signal.SIGKILL)  # no matter if it is dead already: its exit code stays
                status = os.waitpid(pids.pop(number), 0)[1]
                if what == b"W":
                    orders.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)


def warm(seccomp: bool) -> None:
    """Import all that a harness may lead to: a confined child can't open a file. Then leave the heap to be shared."""
    modules = ("unicodedata", "encodings.ascii", "encodings.latin_1", "encodings.utf_16", "encodings.unicode_escape")
    for name in contract.IMPORTS + modules:
        importlib.import_module(name)
    try:
        exec(compile("[unknown_name]", "warm", "exec"), {})
    except NameError:
        traceback.format_exc()
    if seccomp:
        sandbox.seccomp_filter()
    gc.collect()
    gc.freeze()


# ---- the child of one episode ---------------------------------------------------------------------------------------


class Silence:
    """In place of stdout: what a harness prints goes nowhere."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


def play(fd: int, limits: dict) -> None:
    """Run one episode over `fd`. Never returns."""
    try:
        os.closerange(3, fd)
        os.closerange(fd + 1, 1 << 16)
        lines = read_lines(fd)
        start = next(lines)
        sandbox.confine(**limits)
        sys.stdin, sys.stdout, sys.stderr = None, Silence(), Silence()
        for standard in range(3):
            os.close(standard)
        os.write(fd, b" ")  # confined: JSON skips it, and the trainer knows that the rest is the harness's doing
        try:
            converse(fd, lines, start)
            send(fd, {"ended": True})
        except BaseException as error:  # SystemExit and KeyboardInterrupt as well
            send(fd, {"failed": explain(error)})
    except BaseException:
        traceback.print_exc()  # into the server's log, as long as this process has one
    finally:
        os._exit(0)


def converse(fd: int, lines, start: dict) -> None:
    random.seed(start["seed"])
    generator = load(start["source"])(contract.record(start["observation"]))
    if not isinstance(generator, types.GeneratorType):
        raise TypeError("harness(task) must be a generator function")
    replies, value = {}, None
    with contextlib.suppress(StopIteration):
        while True:
            request = generator.send(value)
            send(fd, encode(request, replies))
            answer = next(lines)
            if "reply" in answer:
                value = contract.Reply(**answer["reply"])
                replies[value.turn] = value
            else:
                value = contract.record(answer["result"])


def load(source: str):
    """The harness function of a source text. Compiled from the text: no .pyc can stand for another version."""
    module = types.ModuleType("harness")
    module.__builtins__ = {**vars(builtins), "__import__": checked_import}
    sys.modules["harness"] = module  # where dataclasses look up the types of a class
    linecache.cache["harness.py"] = (len(source), None, source.splitlines(keepends=True), "harness.py")  # tracebacks
    exec(compile(source, "harness.py", "exec", dont_inherit=True), vars(module))
    if not callable(getattr(module, "harness", None)):
        raise TypeError("the file defines no function harness(task)")
    return module.harness


def checked_import(name, globals=None, locals=None, fromlist=(), level=0):
    allowed = name in contract.IMPORTS or name.partition(".")[0] in contract.IMPORTS
    if level or not allowed:
        raise ImportError(f"a harness may import only {', '.join(contract.IMPORTS)}, not {'.' * level + name}")
    return importlib.__import__(name, globals, locals, fromlist, level)


def encode(request, replies: dict) -> dict:
    """Ask or Act as JSON."""
    match request:
        case contract.Ask():
            messages = [encode_message(message, replies) for message in request.messages]
            about = {"max_tokens": request.max_tokens, "stop": request.stop, "tools": request.tools}
            return {"ask": {"messages": messages} | about}
        case contract.Act():
            return {"act": {"action": request.action, "options": request.options}}
    raise TypeError(f"the harness yielded {type(request).__name__}; expected Ask or Act")


def encode_message(message, replies: dict) -> dict:
    match message:
        case contract.Reply(turn=turn, text=text) if turn in replies and replies[turn].text != text:
            return {"role": "assistant", "content": [text]}  # changed by the harness: no longer what was sampled
        case contract.Reply():
            return {"turn": message.turn}
        case contract.Message(content=list(parts)):
            return {"role": message.role, "content": [encode_part(part) for part in parts]}
        case contract.Message():
            return {"role": message.role, "content": [encode_part(message.content)]}
    raise TypeError(f"messages hold {type(message).__name__}; expected Message or Reply")


def encode_part(part):
    return {"text": part.text, "max_tokens": part.max_tokens} if isinstance(part, contract.Clip) else part


def explain(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return "".join(traceback.format_exception(error))[-ERROR_CHARACTERS:]
    return type(error).__name__  # too little memory left, or an exception that can't be shown


def read_lines(fd: int):
    rest = b""
    while chunk := os.read(fd, 1 << 18):
        rest += chunk
        if rest.endswith(b"\n"):  # the trainer sends one line at a time
            yield json.loads(rest)
            rest = b""
    os._exit(0)  # the trainer has closed the episode
