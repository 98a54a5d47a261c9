"""Harness episodes in their own processes: honest ones work, and nothing that a harness does costs more than itself."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sandbox
from harnesses.contract import Clip
from harnesses.host import ActRequest, AskMessage, AskRequest, Ended, Failed, Host, parse

ROOT = Path(__file__).resolve().parent.parent
ASK = "from harnesses.contract import *\nimport random\n"
HONEST = f"""{ASK}
def harness(task):
    reply = yield Ask([user(f'{{task.n}} {{random.random()}}')])
    yield Act(reply.text)
"""
POSITION = {"fen": "8/8/8/8 w", "side": "White", "board": ".", "history": [], "legal": [{"uci": "e2e4", "san": "e4"}]}


@pytest.fixture(scope="module")
def host():
    with Host(step_seconds=10) as host:
        yield host


def first(host, *sources, seed=1):
    """The first request of one episode for each source."""
    episodes = [host.start(source, {"n": 7}, seed) for source in sources]
    try:
        return host.advance([(episode, None) for episode in episodes])
    finally:
        for episode in episodes:
            episode.close()


def asks(expression, before=""):
    """A harness that shows a value to the model."""
    return f"{ASK}{before}\ndef harness(task):\n    yield Ask([user(str({expression}))])"


def shown(request):
    assert isinstance(request, AskRequest), request
    return request.messages[0].content[0]


def reply(turn, text, finish="stop"):
    return {"reply": {"turn": turn, "text": text, "finish": finish}}


def test_h_0_plays_an_episode(host):
    episode = host.start((ROOT / "harnesses/chess_puzzles.py").read_text(), POSITION, 1)
    [ask] = host.advance([(episode, None)])
    assert [m.role for m in ask.messages] == ["system", "user"]
    assert "Legal moves: e2e4\n" in ask.messages[1].content[0]
    assert host.advance([(episode, reply(0, "<move>e2e4</move>"))]) == [ActRequest("e2e4", {})]
    [ask] = host.advance([(episode, {"result": {"accepted": True, "reply": "a7a6", **POSITION}})])
    assert ask.messages[2] == AskMessage("assistant", turn=0) and ask.messages[3].role == "tool"
    [ask] = host.advance([(episode, reply(1, "no move"))])
    assert host.advance([(episode, reply(2, "no move"))]) == [Ended()]
    episode.close()


def test_requests_arrive_whole(host):
    source = ASK + (
        "def harness(task):\n"
        "    reply = yield Ask([user(['a', clip('b c', 1)])], max_tokens=5, stop=('x',), tools=[{'name': 't'}])\n"
        "    changed = Reply(0, 'shorter', 'stop')\n"
        "    yield Ask([reply, changed, assistant('\\u00e9')])\n"
        "    result = yield Act('q', {'k': 3})\n"
        "    yield Ask([tool(result.documents[0].title)])\n"
        "    yield Ask([Reply(9, 'q', 'stop')])"
    )
    episode = host.start(source, {}, 1)
    parts = ("a", Clip("b c", 1))
    assert host.advance([(episode, None)]) == [
        AskRequest((AskMessage("user", parts),), max_tokens=5, stop=("x",), tools=[{"name": "t"}])
    ]
    [ask] = host.advance([(episode, reply(0, "long"))])
    own, changed, written = ask.messages
    assert own == AskMessage("assistant", turn=0)  # as it was sampled
    assert changed == AskMessage("assistant", ("shorter",)) and written == AskMessage("assistant", ("é",))
    assert host.advance([(episode, reply(1, ""))]) == [ActRequest("q", {"k": 3})]
    [ask] = host.advance([(episode, {"result": {"documents": [{"title": "T"}]}})])
    assert ask.messages == (AskMessage("tool", ("T",)),)
    [failed] = host.advance([(episode, reply(2, ""))])
    assert "reply 9, but there are 3" in failed.error


def test_no_state_passes_between_episodes(host):
    places = "Reply.__doc__ == 'left', hasattr(re, 'left'), hasattr(json, 'left'), 'left' in __builtins__"
    traces = "Reply.__doc__ = 'left'; re.left = json.left = __builtins__['left'] = 1; random.random()\n"
    before, during, after = [
        shown(first(host, asks(f"[{places}, random.random()]", "import json, re\n" + what))[0])
        for what in ("", traces, "")
    ]
    assert before == after and before.startswith("[False, False, False, False, ")
    assert during.startswith("[True, True, True, True, ")


def test_same_seed_same_episode_and_fixed_hashes(host):
    source = asks("[random.random(), hash('a'), list({'x', 'y', 'z'})]")
    with Host() as other:
        one, two, three = first(host, source)[0], first(other, source)[0], first(host, source, seed=2)[0]
    assert shown(one) == shown(two) != shown(three)


HANGS = {
    "import": "while True: pass",
    "generator": "def harness(task):\n    while True: pass\n    yield",
    "regex": "import re\ndef harness(task):\n    re.match('(a+)+$', 'a' * 60 + 'b')\n    yield",
}


def test_a_hang_costs_one_episode():  # E4
    def play(sources):
        episodes = [host.start(source, {"n": i}, i) for i, source in enumerate(sources)]
        return host.advance([(episode, None) for episode in episodes])

    with Host(step_seconds=3) as host:
        honest = play([HONEST] * 20)
        mixed = play([HONEST] * 7 + [HANGS["import"]] + [HONEST] * 4 + list(HANGS.values())[1:] + [HONEST] * 6)
    hung = {7, 12, 13}
    assert {i for i, request in enumerate(mixed) if isinstance(request, Failed)} == hung
    assert all("no answer within 3 s" in mixed[i].error for i in hung)
    assert all(mixed[i] == honest[i] and isinstance(honest[i], AskRequest) for i in set(range(20)) - hung)


def test_cpu_time_is_limited():
    with Host(step_seconds=30, cpu_seconds=1) as host:
        [request] = first(host, HANGS["generator"])
    assert "used up its 1 s of CPU time" in request.error


FAILURES = {
    "raise SystemExit(0)": "SystemExit: 0",
    "exit()": "NameError",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "import os; os._exit(0)": "may import only",
    "import numpy": "may import only",
    "from harnesses import host": "may import only",
    "1/0": 'File "harness.py", line 1, in <module>\n    1/0',
    "def harness(task)": "SyntaxError",
    "x = 1": "defines no function harness",
    "def harness(task): return 1": "must be a generator",
    "def harness(task): yield 5": "expected Ask or Act",
    "def harness(task): yield from (1/0 for _ in 'a')": "ZeroDivisionError",
    "x = '\\ud800'\ndef harness(task):\n    raise ValueError(x)\n    yield": "",
    "def f(): f()\nf()": "RecursionError",
    "x = '\0'": "null bytes",
    "[0] * 10**10": "MemoryError",
    "x = []\nwhile True: x.append('a' * 10**6 + str(len(x)))": "MemoryError",
    "from harnesses.contract import *\ndef harness(task): yield Ask(['text'])": "expected Message or Reply",
    "from harnesses.contract import *\ndef harness(task): yield Ask([user(5)])": "must be a text or clip",
    "from harnesses.contract import *\ndef harness(task): yield Ask([user('\\udc80')])": "surrogates not allowed",
    "from harnesses.contract import *\ndef harness(task): yield Ask([], max_tokens=-1)": "max_tokens must be",
    "from harnesses.contract import *\ndef harness(task): yield Ask([Reply(0, '', 'stop')])": "there are 0",
    "from harnesses.contract import *\ndef harness(task): yield Act('a' * (1 << 20))": "a line of over 1048576 bytes",
    "from harnesses.contract import *\ndef harness(task): yield Act('', {'k': [{}] * 20_000})": "more than 20000",
    "from harnesses.contract import *\ndef harness(task): yield Ask([], stop=['a'] * 17)": "at most 16 texts",
    "from harnesses.contract import *\ndef harness(task): yield Ask([], stop=['a' * 201])": "1 to 200 characters",
    "from harnesses.contract import *\ndef harness(task): yield Act('a', {'k': float('nan')})": "not JSON",
}


def test_every_failure_has_its_reason_and_the_rest_go_on(host):  # E3
    requests = first(host, *[source for failing in FAILURES for source in (failing, HONEST)])
    for (source, reason), request in zip(FAILURES.items(), requests[::2], strict=True):
        assert isinstance(request, Failed) and request.error and reason in request.error, (source, request)
    assert all(isinstance(request, AskRequest) and request == requests[1] for request in requests[1::2])


# A harness that gets hold of `os` all the same. What stops it then is the kernel.
OS = "os = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__\n"
SYS = OS + "sys = os['sys']; socket = sys.modules['socket']; frame = sys._getframe()\n"
SYS += "while 'fd' not in frame.f_locals: frame = frame.f_back\nfd = frame.f_locals['fd']\n"
ATTEMPTS = {
    "open": "open('/etc/hostname')",
    "write": "open('/tmp/leak', 'w')",
    "list": "os['listdir']('/')",
    "socket": "socket.socket()",
    "fork": "os['fork']()",
    "kill": "os['kill'](1, 9)",
    "exec": "os['execv']('/bin/sh', ['sh'])",
    "environment of others": "open('/proc/1/environ').read()",
    "working folder": "os['getcwd']()",
}


def test_a_harness_that_breaks_out_of_python_reaches_nothing(host):
    if not sandbox.protections()["seccomp"]:
        pytest.skip("this machine has no seccomp")
    attempts = "".join(
        f"try: {attempt}; found.append({name!r})\nexcept OSError: pass\n" for name, attempt in ATTEMPTS.items()
    )
    [request] = first(host, asks("found", SYS + "found = []\n" + attempts))
    assert shown(request) == "[]"


def test_nothing_of_ours_is_in_its_memory(monkeypatch):
    """Neither our environment, nor a reference, nor an earlier episode's observation."""
    marker = "observation-of-another"
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    with Host() as fresh:  # started while the secret is in our environment
        fresh.advance([(fresh.start(HONEST, {"n": marker}, 1), None)])
        found = f"found = [''.join(text) in memory for text in {[list('SECRET_TOKEN'), list('s3cret'), list(marker)]}]"
        look = f"{SYS}memory = str(sys.modules['gc'].get_objects())\n{found}"
        [request] = first(fresh, asks("found", look))
        [names] = first(fresh, asks("sorted(os['environ'])", SYS))
    assert shown(request) == "[False, False, False]"
    assert shown(names) == str(sorted(sandbox.environment("")))


FORGED = [
    b"\n",
    b"{}\n",
    b"[" * 100_000 + b"\n",
    b'{"ended": true}\n{"ended": true}\n',
    b'{"ended": 1}\n',
    b"\xff\xfe\n",
    '{"ended": true}\n'.encode("utf-16"),
    b'{"act": {"action": "a", "options": {"k": 1e999}}}\n',
    b'{"act": {"action": "a", "options": {"k": %s}}}\n' % (b"9" * 4000),
    b'{"act": {"action": "a", "options": {"k": NaN}}}\n',
    b'{"act": {"action": "\\ud800", "options": {}}}\n',
    b'{"act": {"action": "a", "options": %s}}\n' % (b'{"a":' * 40 + b"1" + b"}" * 40),
    b'{"act": {"action": 5, "options": {}}}\n',
    b'{"ask": {"messages": [{"turn": true}], "max_tokens": null, "stop": [], "tools": null}}\n',
    b'{"ask": {"messages": [{"turn": -1}], "max_tokens": null, "stop": [], "tools": null}}\n',
    b'{"ask": {"messages": [{"role": "root", "content": []}], "max_tokens": null, "stop": [], "tools": null}}\n',
    b'{"ask": {"messages": [], "max_tokens": true, "stop": [], "tools": null}}\n',
    b'{"ask": {"messages": [], "max_tokens": null, "stop": "abc", "tools": null}}\n',
    b'{"ask": {"messages": [], "max_tokens": null, "stop": [], "tools": [5]}}\n',
    b'{"reward": 1}\n',
    b"",
]


def test_forged_lines_cost_only_their_episode(host):
    forge = SYS + "os['write'](fd, bytes.fromhex('%s'))\nos['_exit'](3)"
    requests = first(host, *[source for line in FORGED for source in (forge % line.hex(), HONEST)])
    for line, request in zip(FORGED, requests[::2], strict=True):
        assert isinstance(request, Failed) and request.error, (line, request)
    assert "exited with code 3" in requests[-2].error
    assert all(isinstance(request, AskRequest) for request in requests[1::2])


def test_a_closed_or_dripping_socket_costs_only_its_episode():
    drip = SYS + "time = sys.modules['time']\nwhile True: os['write'](fd, b' ')"
    with Host(step_seconds=2) as host:
        closed, dripping, honest = first(host, SYS + "os['close'](fd)\nwhile True: pass", drip, HONEST)
    assert "killed by SIGKILL" in closed.error and isinstance(honest, AskRequest)
    assert "line of over" in dripping.error or "no answer" in dripping.error


def test_lines_that_arrive_in_pieces_are_joined(host):
    line = b'{"act": {"action": "a", "options": {}}}\n'
    wait = "for _ in range(20000): pass\n"
    pieces = "".join(f"os['write'](fd, {line[i : i + 5]!r})\n{wait}" for i in range(0, len(line), 5))
    assert first(host, SYS + pieces + "\nwhile True: pass") == [ActRequest("a", {})]


def test_what_it_prints_goes_nowhere(host):
    assert shown(first(host, asks("7", "for i in range(10**6): print('noise')"))[0]) == "7"


def test_our_random_numbers_are_untouched(host):  # E9
    import numpy

    random.seed(5), numpy.random.seed(5)
    expected = random.Random(5).random(), numpy.random.RandomState(5).rand()
    first(host, asks("1", "random.seed(0); random.random()"))
    assert (random.random(), numpy.random.rand()) == expected


def test_a_file_rewritten_in_the_same_second_runs_its_new_text(host, tmp_path, monkeypatch):  # E1
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path, seen = tmp_path / "candidate.py", []
    for value in range(5):
        path.write_text(asks(value))
        os.utime(path, (1, 1))
        seen.append(shown(first(host, path.read_text())[0]))
    assert seen == list("01234") and not list(tmp_path.rglob("*.pyc"))


def test_hundreds_live_at_once(host):
    episodes = [host.start(HONEST, {"n": i}, i) for i in range(300)]
    requests = host.advance([(episode, None) for episode in episodes])
    assert [shown(request).split()[0] for request in requests] == [str(i) for i in range(300)]
    acts = host.advance([(episode, reply(0, str(i))) for i, episode in enumerate(episodes)])
    assert acts == [ActRequest(str(i), {}) for i in range(300)]
    for episode in episodes:
        episode.close()
        episode.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc (Linux)")
def test_a_dead_server_is_our_fault():
    with Host() as host:
        episode = host.start(HONEST, {"n": 1}, 1)
        host.advance([(episode, None)])
        family = descendants(host.process.pid)
        host.process.kill()
        host.process.wait()
        wait_until_gone(family)
        with pytest.raises(RuntimeError, match="not the harness's fault"):
            host.advance([(episode, reply(0, "a"))])
        with pytest.raises(RuntimeError, match="closed"):
            host.start(HONEST, {"n": 1}, 1)
        episode.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc (Linux)")
def test_the_host_dies_with_us():
    trainer = f"""
from harnesses.host import Host
host = Host()
print('up', flush=True)
host.advance([(host.start({HANGS["import"]!r}, {{}}, 1), None)])
"""
    ours = subprocess.Popen([sys.executable, "-c", trainer], cwd=ROOT, stdout=subprocess.PIPE)
    assert ours.stdout.readline() == b"up\n"
    time.sleep(0.5)
    family = descendants(ours.pid)
    assert len(family) >= 3  # supervisor, server, the hanging episode
    ours.kill()
    ours.wait()
    wait_until_gone(family)


def wait_until_gone(family, seconds=5):
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < deadline, family
        time.sleep(0.02)


def descendants(pid):
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def test_parse_takes_a_well_formed_line():
    assert parse(b'{"act": {"action": "a", "options": {"k": 3}}}\n', 0) == ActRequest("a", {"k": 3})


def test_limits_of_a_request_are_allowed_themselves():
    zeros = b"0" + b",0" * 19_990  # 1 + 2 + 4 + 2 values around them
    line = b'{"act": {"action": "a", "options": {"k": [%s]}}}\n'
    assert len(parse(line % zeros, 0).options["k"]) == 19_991
    with pytest.raises(ValueError, match="more than 20000 values"):
        parse(line % (zeros + b",0"), 0)
    stop = ["a" * 200] * 16
    ask = {"ask": {"messages": [], "max_tokens": None, "stop": stop, "tools": None}}
    assert parse(json.dumps(ask).encode(), 0).stop == tuple(stop)
