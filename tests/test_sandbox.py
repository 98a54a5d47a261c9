"""sandbox.run on real programs, with the namespaces and without; what the start-up line says is what holds."""

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sandbox

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl (Linux)")
LIMITS = {"wall_seconds": 10, "cpu_seconds": 10, "memory_bytes": 1 << 30, "output_bytes": 64 << 10, "processes": 32}


def python(tmp_path, program, **changes):
    (tmp_path / "program.py").write_text(program)
    return sandbox.run([sys.executable, "-u", "program.py"], cwd=tmp_path, **LIMITS | changes)


def bare(tmp_path, program, wall_seconds=10):
    """On a machine without namespaces."""
    (tmp_path / "program.py").write_text(program)
    return sandbox._run([sys.executable, "-u", "program.py"], None, tmp_path, [], None, wall_seconds, 1 << 16)


def alive(marker):
    """Processes of this machine with this text in their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                found += [pid] if marker in file.read() else []
        except OSError:
            pass
    return found


def test_a_program_gets_its_input_and_its_folder(tmp_path):
    program = "import numpy, os; print(input(), os.getcwd()); open('out', 'w').write('5')"
    result = python(tmp_path, program, stdin=b"hello\n")
    assert (result.stdout, result.stderr, result.returncode) == (f"hello {tmp_path}\n", "", 0)
    assert (tmp_path / "out").read_text() == "5"


def test_output_before_a_timeout_is_kept(tmp_path, monkeypatch):  # B10
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    result = python(tmp_path, "print('partial 17')\nwhile True: pass", wall_seconds=1.5)
    assert result.stdout == "partial 17\n" and result.timed_out and result.seconds < 2.5


@LINUX_ONLY
@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("how", [python, bare])
def test_a_grandchild_that_holds_the_pipe_is_dead_at_return(tmp_path, session, how):  # B11
    nap = f"6{int(session)}.{time.time_ns() % 10**9}"
    program = f"""
import subprocess
print('x', flush=True)
subprocess.Popen(['sleep', '{nap}'], start_new_session={session}, env={{}})
subprocess.Popen(['sh', '-c', 'sleep {nap} & sleep {nap}'])
"""
    result = how(tmp_path, program)
    assert (result.stdout, result.returncode, result.timed_out) == ("x\n", 0, False) and result.seconds < 3
    assert not alive(nap)


@LINUX_ONLY
@pytest.mark.parametrize("how", [python, bare])
def test_a_timeout_leaves_no_descendant(tmp_path, how):
    nap = f"77.{time.time_ns() % 10**9}"
    program = f"import os, time\nif os.fork() == 0: os.setsid(); os.execlp('sleep', 'sleep', '{nap}')\ntime.sleep(60)"
    result = how(tmp_path, program, wall_seconds=1.5)
    assert result.timed_out and result.returncode == -9 and not alive(nap)


def test_limits(tmp_path):  # B12
    assert "MemoryError" in python(tmp_path, "[0] * 10**10").stderr
    assert "EOFError" in python(tmp_path, "print(input())").stderr
    assert python(tmp_path, r"import os; os.write(1, b'\xff\xfe ok')").stdout == "\ufffd\ufffd ok"
    assert "4300 digits" in python(tmp_path, "print(2**20000)").stderr
    assert python(tmp_path, "import os; os._exit(0)").stdout == ""
    assert python(tmp_path, "while True: pass", cpu_seconds=1).returncode in (-9, -24)
    assert python(tmp_path, "x = 1\n" * 40_000 + "print(x)").stdout == "1\n"
    assert python(tmp_path, "import sys; print('oops', file=sys.stderr); sys.exit(3)").returncode == 3


def test_a_flood_of_output_is_cut_and_marked(tmp_path):  # B12
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = python(tmp_path, "for _ in range(400): print('a' * 1_000_000, end='')", wall_seconds=20, cpu_seconds=20)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB on Linux
    assert result.truncated and result.stdout == "a" * (64 << 10) and result.returncode == 0
    assert grown < 50 << 10 or sys.platform != "linux"


def test_a_fork_loop_is_stopped(tmp_path):  # B12
    if not sandbox.protections()["unprivileged"]:
        pytest.skip("root ignores the limit on processes, and this machine can't drop root")
    program = "import os, time\nfor i in range(20):\n    if os.fork() == 0: time.sleep(5); os._exit(0)\n    print(i)"
    result = python(tmp_path, program, processes=5)
    assert "BlockingIOError" in result.stderr and result.stdout in ("0\n1\n2\n", "0\n1\n2\n3\n")


def test_nothing_of_ours_is_in_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    program = """
import os, socket, signal
print(sorted(os.environ))
def attempt(name, act):
    try: print(name, act())
    except OSError as error: print(name, 'refused')
attempt('checkout', lambda: os.listdir(%r))
attempt('network', lambda: socket.create_connection(('127.0.0.1', %d), 2))
attempt('parent', lambda: os.kill(%d, 0))
attempt('outside', lambda: open('../leak', 'w'))
environ = b''
for pid in filter(str.isdigit, os.listdir('/proc')):
    try: environ += open(f'/proc/{pid}/environ', 'rb').read()
    except OSError: pass
print(b's3cret' in environ)
"""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        checkout, port = os.path.dirname(os.path.abspath(sandbox.__file__)), ours.getsockname()[1]
        result = python(tmp_path, program % (checkout, port, os.getpid()))
    names, *tries, leaked = result.stdout.splitlines()
    assert names == str(sorted(sandbox.environment("")))  # Python may add LC_CTYPE where LANG is not UTF-8
    missing = [name for name in ("mount", "net", "pid") if not sandbox.protections()[name]]
    if missing:
        pytest.skip(f"this machine gives no {', '.join(missing)} namespace: {result.stdout}")
    # a virtual environment inside the checkout must be readable, and is all that is there
    inside = Path(sys.prefix).is_relative_to(checkout) and [Path(sys.prefix).relative_to(checkout).parts[0]]
    assert tries[0] == (f"checkout {inside}" if inside else "checkout refused")
    assert tries[1:3] == ["network refused", "parent refused"] and leaked == "False"
    assert not (tmp_path.parent / "leak").exists()  # what it wrote there was a folder of its own


def test_what_is_missing_is_said():
    have, line = sandbox.protections(), sandbox.describe()
    assert line.startswith("sandbox: ") and set(have) == {"seccomp", "limits", *sandbox.FEATURES}
    assert ("missing: nothing" in line) == all(have.values())


def test_a_program_that_does_not_exist_is_our_fault(tmp_path):
    with pytest.raises(RuntimeError, match="can't start no-such-program"):
        sandbox.run(["no-such-program"], cwd=tmp_path, **LIMITS)


@LINUX_ONLY
def test_the_program_dies_with_us(tmp_path):
    nap = f"88.{time.time_ns() % 10**9}"
    trainer = f"""
import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(sandbox.__file__))!r})
import sandbox
kept = sandbox.spawn(['sleep', '{nap}'], cwd={str(tmp_path)!r}, features=sandbox.available(), stdin=-3)
print('up', flush=True); input()
"""
    ours = subprocess.Popen([sys.executable, "-c", trainer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert ours.stdout.readline() == b"up\n"
    wait_until(lambda: alive(f"sleep\0{nap}\0"))
    ours.kill()
    ours.wait()
    wait_until(lambda: not alive(f"sleep\0{nap}\0"))


def wait_until(holds, seconds=10):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
