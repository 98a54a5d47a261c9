"""The one way to run code that isn't ours: the Math interpreter's programs (`run`) and the harness host (`spawn`).

    trainer -- supervisor (this file as a script) -- the program, first process of its own pid namespace

On Linux the program runs as an unprivileged user in pid, network, ipc and mount namespaces of its own, the last with
its own root: the system's and Python's folders read-only, its working folder, nothing else. What a machine doesn't
allow is left out and said by `protections`; other systems have the limits only.

NOT covered: bugs of the kernel; side channels; disk space in the working folder; the memory and CPU time of several
processes together (both limits are per process, only wall time and the number of processes bind the whole); without a
pid namespace, a program that kills its supervisor; without a mount namespace, reading whatever the user may read;
without Linux, descendants that leave their process group.
"""

import contextlib
import ctypes
import functools
import json
import os
import platform
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

LINUX = sys.platform == "linux"
NOBODY = 65534
FILE_BYTES = 256 << 20  # the largest file that a program may write

libc = ctypes.CDLL(None, use_errno=True)
PDEATHSIG, DUMPABLE, SECCOMP, SUBREAPER, NO_NEW_PRIVS = 1, 4, 22, 36, 38  # of prctl
NAMESPACES = {"pid": 0x20000000, "net": 0x40000000, "mount": 0x00020000, "ipc": 0x08000000}  # CLONE_NEW*
NEW_USER = 0x10000000
FEATURES = (*NAMESPACES, "user", "unprivileged")
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18  # MS_*
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NEW_ROOT = "/sys"  # any folder that every machine has and no program needs
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime",
            "/etc/alternatives")  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# What pure Python needs between one message and the next: memory, its open socket, the end. (x86_64, aarch64)
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "exit": (60, 93), "gettimeofday": (96, 169), "sigaltstack": (131, 132), "futex": (202, 98),
    "restart_syscall": (219, 128), "clock_gettime": (228, 113), "exit_group": (231, 94), "ppoll": (271, 73),
    "getrandom": (318, 278),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit word, column of ALLOWED


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# ---- inside a process, before foreign code --------------------------------------------------------------------------


def confine(*, memory_bytes: int, cpu_seconds: float, seccomp: bool) -> None:
    """Shut this process in for good: from here on it computes and uses the files it has open, nothing else.

    Every other system call fails with EPERM (no open, socket, fork, kill, exec). With `seccomp` False that part is left
    out, for machines without it. Raises OSError where a protection that was asked for can't be had.
    """
    drop_root()
    limit(memory_bytes=memory_bytes, cpu_seconds=cpu_seconds, processes=0, file_bytes=0, open_files=0)
    if not LINUX:
        return
    _call(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _call(libc.prctl(DUMPABLE, 0, 0, 0, 0), "dumpable")  # no sibling may look into this process
    _call(libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")  # after setuid, which clears it
    if seccomp:
        _call(libc.prctl(SECCOMP, 2, ctypes.byref(seccomp_filter()), 0, 0), "seccomp")


def drop_root() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def limit(*, memory_bytes: int, cpu_seconds: float, processes: int, file_bytes: int, open_files: int) -> None:
    """Resource limits, never above those already set; what the system refuses is left out (macOS: memory)."""
    cpu = max(1, -int(-cpu_seconds // 1))
    wanted = {"RLIMIT_AS": memory_bytes, "RLIMIT_NPROC": processes, "RLIMIT_FSIZE": file_bytes,
              "RLIMIT_NOFILE": open_files, "RLIMIT_CORE": 0}  # fmt: skip
    for name, soft, hard in [(k, v, v) for k, v in wanted.items()] + [("RLIMIT_CPU", cpu, cpu + 1)]:
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (soft, hard))


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


@functools.cache
def seccomp_filter() -> _Program:
    """The seccomp filter: another architecture kills, a listed call passes, the rest fails with EPERM."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"no seccomp filter for {platform.machine()}")
    audit, column = ARCHITECTURES[platform.machine()]
    numbers = [row[column] for row in ALLOWED.values()]
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    code = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    code += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]  # jump past the refusal
    code += [(give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000)]  # EPERM; allow
    return _Program(len(code), b"".join(struct.pack("HBBI", *step) for step in code))


# ---- the supervisor: this file as a script --------------------------------------------------------------------------


def supervise(config: dict, argv: list[str]) -> None:
    """Enter the namespaces, start argv inside, and leave no descendant alive, whether it ends, runs out of time, or the
    trainer goes. The verdict goes to the trainer as one JSON line."""
    status = socket.socket(fileno=config["status"])
    status.set_inheritable(False)
    woken, wake = socket.socketpair()
    woken.setblocking(False), wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    try:
        enter(config["features"])
        if (child := os.fork()) == 0:
            start(config, argv, status)
    except OSError as error:
        return status.sendall(json.dumps({"error": f"{error}"}).encode() + b"\n")
    deadline = time.monotonic() + (config["wall_seconds"] or float("inf"))
    timed_out = False
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        left = deadline - time.monotonic()
        ready = select.select([status, woken], [], [], min(max(left, 0), 3600))[0]
        if woken in ready:
            woken.recv(64)
        if status in ready or left <= 0:  # the trainer is gone, or the time is up
            timed_out = left <= 0
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
    bury(child)
    verdict = {"returncode": os.waitstatus_to_exitcode(ended[1]), "timed_out": timed_out}
    with contextlib.suppress(BrokenPipeError):
        status.sendall(json.dumps(verdict).encode() + b"\n")


def enter(features: list[str]) -> None:
    """New namespaces for this process and its children. A user namespace comes first where root doesn't allow them."""
    if not LINUX:
        return
    libc.prctl(SUBREAPER, 1, 0, 0, 0)  # without a pid namespace, orphans come to us and `bury` finds them
    if "user" in features and not may_mount():
        drop_root()
        libc.prctl(DUMPABLE, 1, 0, 0, 0)  # lost with root; without it our own uid_map is not ours to write
        user, group = os.geteuid(), os.getegid()
        _call(libc.unshare(NEW_USER), "user namespace")
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    for name in [name for name in NAMESPACES if name in features]:
        _call(libc.unshare(NAMESPACES[name]), f"{name} namespace")


def may_mount() -> bool:
    """Root with CAP_SYS_ADMIN, which a container's root often lacks."""
    with open("/proc/self/status") as file:
        return int(dict(line.split(":", 1) for line in file)["CapEff"], 16) >> 21 & 1 == 1


def start(config: dict, argv: list[str], status: socket.socket) -> None:
    """In the child: build its root, drop what it must not have, become the program. Never returns."""
    try:
        os.setsid()
        if "mount" in config["features"]:
            private_root([*config["readable"]], config["cwd"], own_proc="pid" in config["features"])
        os.chdir(config["cwd"])
        if os.geteuid() == 0 and "unprivileged" in config["features"]:
            drop_root()
            if "user" in config["features"]:  # so that RLIMIT_NPROC counts this program's processes alone
                _call(libc.unshare(NEW_USER), "user namespace")
        if config["limits"]:
            limit(**config["limits"])
        if LINUX:
            _call(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
            _call(libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores two of them, and an exec would keep that
        os.execvpe(argv[0], argv, environment(config["cwd"]))
    except BaseException as error:
        status.sendall(json.dumps({"error": f"can't start {argv[0]}: {error}"}).encode() + b"\n")
    finally:
        os._exit(127)


def private_root(readable: list[str], writable: str, own_proc: bool) -> None:
    """Make a root that holds `readable` (read-only), `writable`, an empty /tmp, a few devices, and go there."""
    _call(libc.mount(None, b"/", None, REC | PRIVATE, None), "private mounts")
    _call(libc.mount(b"tmpfs", NEW_ROOT.encode(), b"tmpfs", NOSUID | NODEV, b"mode=0755,size=64m"), "new root")
    os.makedirs(NEW_ROOT + "/tmp")
    os.chmod(NEW_ROOT + "/tmp", 0o1777)
    for path in dict.fromkeys([*READABLE, *readable]):
        if os.path.islink(path):  # /bin -> usr/bin
            os.symlink(os.readlink(path), NEW_ROOT + path)
        elif os.path.exists(path):
            bind(path, read_only=True)
    for path in DEVICES:
        bind(path, read_only=False)
    if writable != "/":
        bind(writable, read_only=False)
    os.makedirs(NEW_ROOT + "/proc")
    if own_proc:  # otherwise /proc stays empty: the real one shows other processes
        _call(libc.mount(b"proc", f"{NEW_ROOT}/proc".encode(), b"proc", NOSUID | NODEV, None), "/proc")
    os.chdir(NEW_ROOT)
    _call(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")  # the old root lies on top now:
    _call(libc.umount2(b".", 2), "leaving the old root")  # 2 = MNT_DETACH


def bind(path: str, read_only: bool) -> None:
    place = NEW_ROOT + path
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if not os.path.exists(place):
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
    _call(libc.mount(path.encode(), place.encode(), None, BIND | REC, None), f"mount {path}")
    if read_only:
        kept = os.statvfs(path).f_flag & (2 | 4 | 8 | 1024 | 2048)  # nosuid, nodev, noexec, no(dir)atime may be locked
        kept |= REMOUNT | BIND | RDONLY | NOSUID
        _call(libc.mount(None, place.encode(), None, kept, None), f"read-only {path}")


def bury(child: int) -> None:
    """Kill and reap what the program left: with a pid namespace it is dead already, otherwise it is our child now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while LINUX:
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def environment(home: str) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # fmt: skip


# ---- the trainer's side ---------------------------------------------------------------------------------------------


def spawn(argv, *, cwd, features, limits=None, wall_seconds=None, readable=(), pass_fds=(), **streams):
    """Start argv under a supervisor -> (its Popen, a socket that will carry its verdict).

    Closing the socket kills the program and all its descendants. `streams` are Popen's stdin, stdout, stderr.
    """
    ours, theirs = socket.socketpair()
    readable = [sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix, *map(str, readable)]
    config = {"status": theirs.fileno(), "cwd": os.path.realpath(cwd), "features": list(features), "limits": limits,
              "wall_seconds": wall_seconds, "readable": [p for p in readable if p != "/usr"]}  # fmt: skip
    command = [sys.executable, "-I", "-S", "-B", os.path.abspath(__file__), json.dumps(config), *argv]
    with theirs:
        process = subprocess.Popen(
            command, cwd="/", env={}, pass_fds=(theirs.fileno(), *pass_fds), start_new_session=True, **streams
        )  # a session of its own: Ctrl-C is the trainer's business
    return process, ours


@dataclass(frozen=True)
class Result:
    stdout: str
    stderr: str
    returncode: int  # -n: killed by signal n
    timed_out: bool
    truncated: bool  # stdout or stderr went over output_bytes
    seconds: float


def run(argv, *, stdin: bytes | None = None, cwd, wall_seconds: float, cpu_seconds: float, memory_bytes: int,
        output_bytes: int, processes: int, network: bool = False) -> Result:  # fmt: skip
    """Run a program in the folder `cwd`, which is given over to it, with an environment that holds nothing of ours.

    Limits: seconds of wall and CPU time, address space of each process, processes at one time (our own may count as
    one), bytes kept of stdout and of stderr each (the rest is read and dropped). No stdin means end of file at once.
    What was printed before a time-out is kept. No descendant is alive afterwards. Raises RuntimeError if the sandbox
    itself can't start the program.
    """
    limits = {"cpu_seconds": cpu_seconds, "memory_bytes": memory_bytes, "processes": processes,
              "file_bytes": FILE_BYTES, "open_files": 256}  # fmt: skip
    features = [name for name in available() if not (network and name == "net")]
    return _run(argv, stdin, cwd, features, limits, wall_seconds, output_bytes)


def _run(argv, stdin, cwd, features, limits, wall_seconds, output_bytes, readable=()) -> Result:
    began = time.monotonic()
    if os.geteuid() == 0:
        os.chown(cwd, NOBODY, NOBODY)
    with tempfile.TemporaryFile() as given:
        given.write(stdin or b"")
        given.seek(0)
        streams = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process, status = spawn(argv, cwd=cwd, features=features, limits=limits, wall_seconds=wall_seconds,
                                readable=readable, **streams)  # fmt: skip
    with status, process.stdout, process.stderr:
        verdict, (out, err), truncated = _collect(process, status, output_bytes)
    process.wait()
    # no verdict: without a pid namespace, the program can kill its supervisor
    verdict = json.loads(verdict.split(b"\n")[0] or b'{"returncode": -9, "timed_out": false}')
    if "error" in verdict:
        raise RuntimeError(f"sandbox: {verdict['error']}")
    text = [bytes(stream).decode("utf-8", "replace") for stream in (out, err)]
    return Result(*text, verdict["returncode"], verdict["timed_out"], truncated, time.monotonic() - began)


def _collect(process, status, output_bytes):
    """Read both pipes until the verdict is in and they are empty; not until they close, as a survivor may hold them."""
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    truncated, verdict, until = False, None, float("inf")
    with selectors.DefaultSelector() as selector:
        for stream in (*kept, status):
            selector.register(stream, selectors.EVENT_READ)
        while (ready := selector.select(None if verdict is None else 0)) and time.monotonic() < until:
            for stream in [key.fileobj for key, _ in ready]:
                chunk = os.read(stream.fileno(), 65536)
                if stream is status:
                    verdict, until = chunk, time.monotonic() + 1
                else:
                    room = output_bytes - len(kept[stream])
                    kept[stream] += chunk[:room]
                    truncated |= len(chunk) > room
                if not chunk or stream is status:
                    selector.unregister(stream)
    return verdict, kept.values(), truncated


@functools.cache
def protections() -> dict[str, bool]:
    """What this machine gives, each tried for real in a child."""
    facts = _probe(FEATURES)
    if facts is None:  # not all at once: which of them, then, each with what it may depend on
        first = ("unprivileged",) if os.geteuid() == 0 and may_mount() else ("user", "unprivileged")
        works = [name for name in FEATURES if _probe((*first, name)) or _probe((name,))]
        facts = _probe(works) or _probe([name for name in works if name != "mount"]) or _probe(()) or {}
    return {name: facts.get(name, False) for name in ("seccomp", "limits", *FEATURES)}


def available() -> list[str]:
    """The features of `spawn` that this machine gives."""
    return [name for name in FEATURES if protections()[name]]


def describe() -> str:
    """One line for the log at start-up."""
    words = {name: f"{name} namespace" for name in (*NAMESPACES, "user")} | {"unprivileged": "unprivileged user"}
    on, off = [[words.get(k, k) for k, there in protections().items() if there is want] for want in (True, False)]
    return f"sandbox: {', '.join(on) or 'nothing'}; missing: {', '.join(off) or 'nothing'}"


def _probe(features) -> dict[str, bool] | None:
    """Start a child with exactly these features and let it look around -> what it found, None if it can't start."""
    limits = {"cpu_seconds": 5, "memory_bytes": 1 << 30, "processes": 64, "file_bytes": 0, "open_files": 64}
    here = os.path.abspath(__file__)
    argv = [sys.executable, "-I", "-S", "-B", here, "look around", json.dumps(features)]
    with tempfile.TemporaryDirectory() as cwd:
        try:
            return json.loads(_run(argv, None, cwd, features, limits, 20, 1 << 16, readable=[here]).stdout)
        except (RuntimeError, json.JSONDecodeError):
            return None


def look_around(features: list[str]) -> dict[str, bool]:
    """In the probe's child: what holds here. `start` has made the namespaces of `features` or failed."""
    facts = {name: name in features for name in FEATURES}
    facts["pid"] &= os.getpid() == 1
    facts["net"] &= [name for _, name in socket.if_nameindex()] == ["lo"]
    facts["mount"] &= not os.path.exists(NEW_ROOT)
    facts["unprivileged"] = os.geteuid() != 0
    facts["limits"] = _fails(MemoryError, lambda: bytearray(2 << 30))
    with contextlib.suppress(OSError):
        confine(memory_bytes=1 << 30, cpu_seconds=5, seccomp=LINUX)
        facts["seccomp"] = LINUX and _fails(PermissionError, os.getcwd) and _fails(PermissionError, os.fork)
    return facts


def _fails(error, attempt) -> bool:
    try:
        attempt()
    except error:
        return True
    return False


if __name__ == "__main__":
    if sys.argv[1] == "look around":
        os.write(1, json.dumps(look_around(json.loads(sys.argv[2]))).encode())
        os._exit(0)
    supervise(json.loads(sys.argv[1]), sys.argv[2:])
