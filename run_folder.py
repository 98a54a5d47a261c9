"""What a run leaves on disk, and how it goes on from there.

Everything paid for is a unit (journal.py) with a name, in `rollouts/`, `updates/` or `proposals/`. A full state in
`checkpoints/` is theta, the optimizer, and the loop's state at the start of a phase. A resume loads the newest full
state and walks the loop again from that phase's start: what is on disk is read instead of made, so that windows,
patience, archive and log come out as they were, and updates that theta does not have yet are done again.
"""

import copy
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

import journal
from data_types import Candidate, Trajectory
from harnesses import check
from rsft import Step

FORMAT = 2  # of a run folder; a run of another one is refused
FOLDERS = {Trajectory: "rollouts", Step: "updates", Candidate: "proposals"}


def counts() -> dict[str, int]:
    return {"train": 0, "search": 0, "incumbent": 0, "test": 0}


@dataclass
class State:
    """All that the loop carries from phase to phase, besides theta and the optimizer."""

    h: str  # source of the current harness
    drawn: int = 0  # prompts drawn from D_weight so far
    s: int = 0  # rollout steps so far
    theta: int = 0  # the weights are those after so many rollout steps
    searched: int = 0  # harness-search iterations so far
    rollouts: dict[str, int] = field(default_factory=counts)
    tokens: dict[str, int] = field(default_factory=counts)  # sampled
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys([*counts(), "updates", "proposals"], 0.0))
    pairs: list[dict] = field(default_factory=list)  # every measured (theta, h)
    finished: list[str] = field(default_factory=list)  # phases, as "0.weight"

    def is_due(self, phase: str, budget: float) -> bool:
        """Not finished before a resume, and the rollouts are not spent."""
        return phase not in self.finished and self.spent < budget

    @property
    def spent(self) -> int:
        """Rollouts as the paper counts them: training plus candidates; the incumbent's and the test's are apart."""
        return self.rollouts["train"] + self.rollouts["search"]

    def count(self, what: str, trajectories: Sequence[Trajectory], about: dict) -> None:
        self.rollouts[what] += len(trajectories)
        self.tokens[what] += sum(tau.sampled_tokens for tau in trajectories)
        self.seconds[what] += about["seconds"]


class Run:
    """One run folder, held by this process alone."""

    def __init__(self, folder: Path, lock, about: dict):
        self.folder, self.lock, self.about, self.config = folder, lock, about, about["config"]
        self.full_state, newest = full_states(folder)[-1]
        self.last_checkpoint = newest if self.full_state["files"] else None  # None: theta is that of --model
        self.state = State(**{f.name: copy.deepcopy(self.full_state["state"][f.name]) for f in fields(State)})
        self.trained = self.full_state["trained"]  # rollout steps that theta has been through; the loop may be behind
        self.saved = time.monotonic()

    @classmethod
    def create(cls, folder: Path, config: dict, h_0: str, data: str = "") -> "Run":
        folder.mkdir(parents=True, exist_ok=True)
        lock = journal.lock(folder)
        if {path.name for path in folder.iterdir()} != {"lock"}:
            raise ValueError(f"--out: expected a new or empty folder, found {folder}; is it a run to --resume?")
        about = {"format": FORMAT, "config": config, "h_0": sha256(h_0), "data": data}
        about |= {"threads": torch.get_num_threads(), "versions": versions()}
        about = json.loads(json.dumps(about, default=str, allow_nan=False))
        state = {"state": asdict(State(h_0)), "began": about, "trained": 0, "weights": 0, "log_bytes": 0}
        journal.write(folder / "h_0.py", h_0)
        journal.write(folder / "checkpoints" / "start" / "state.json", dumps({**state, "plan": None, "files": {}}))
        journal.write(folder / "config.json", dumps(about))
        run = cls(folder, lock, about)
        run.keep_harnesses([h_0])
        return run

    @classmethod
    def resume(cls, folder: Path) -> "Run":
        """A run to go on with from its newest full state; nothing in the folder is changed yet. Raises ValueError in
        one line for a folder that is no run of this version, is in use, or was changed by hand."""
        about = read_about(folder)
        run = cls(folder, journal.lock(folder), about)
        began, now = ({**stored, **stored["config"], "config": None} for stored in (run.full_state["began"], about))
        if changed := sorted(name for name in began.keys() | now if began.get(name) != now.get(name)):
            what = "; ".join(f"{name} was {began.get(name)!r}, is {now.get(name)!r}" for name in changed)
            raise ValueError(f"expected the settings that the run began with, found others: {what}")
        if sha256((folder / "h_0.py").read_text(encoding="utf-8")) != about["h_0"]:
            raise ValueError(f"expected the harness that the run began with, found {folder / 'h_0.py'} edited")
        if (found := run.log_bytes()) < (size := run.full_state["log_bytes"]):
            raise ValueError(f"expected at least {size} bytes in {folder / 'log.jsonl'}, found {found}")
        return run

    def rewind(self, data: str) -> None:
        """Back to the start of the full state's phase: drop half-written things, and what the loop writes again. With
        the threads of the first time, since sums depend on them; ValueError unless the data are those of the first."""
        if data != self.about["data"]:
            where = self.config["puzzles"] or "the built-in puzzles"
            raise ValueError(f"expected the puzzles that the run began with, found others in {where}")
        torch.set_num_threads(self.about["threads"])
        then, now = self.about["versions"], versions()
        if changed := [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]:
            print(f"going on with other versions: {', '.join(changed)}", flush=True)
        journal.drop_half_written(self.folder)
        if self.log_bytes():
            os.truncate(self.folder / "log.jsonl", self.full_state["log_bytes"])
        for left in (self.folder / "archive").glob("cycle_*"):
            if left.is_dir() and left.name not in map(phase_folder, self.state.finished):
                shutil.rmtree(left)

    def log_bytes(self) -> int:
        log = self.folder / "log.jsonl"
        return log.stat().st_size if log.exists() else 0

    # Units -----------------------------------------------------------------------------------------------------------

    def once(self, kind: type, name: str, make, *args, **options) -> tuple[list, dict]:
        """The unit of this name: read where it is on disk, else made and written -> its records, the line about it."""
        path = self.folder / FOLDERS[kind] / f"{name}.jsonl"
        if not path.exists() and self.trained <= self.state.s:  # what theta was trained on can't be made again
            journal.write_unit(path, *self._make(make, *args, **options))
        return journal.read_unit(kind, path)

    def update(self, name: str, make, *args) -> tuple[list[Step], dict]:
        """An update of theta by the figures of its steps: read where theta has been through it, else made; made again,
        where a kill came before the next full state, and then the first time's seconds count."""
        path = self.folder / FOLDERS[Step] / f"{name}.jsonl"
        if self.trained == self.state.s:
            steps, about = self._make(make, *args)
            self.trained += 1
            if not path.exists():
                journal.write_unit(path, steps, about)
            elif journal.read_unit(Step, path)[0] != steps:
                print(f"{path}: done again after a kill, not equal to the bit", file=sys.stderr)
        return journal.read_unit(Step, path)

    def _make(self, make, *args, **options) -> tuple[list, dict]:
        began = time.monotonic()
        records = make(*args, **options)
        seconds = time.monotonic() - began
        return records, {"weights": self.state.theta, "seconds": seconds, "peak_gib": peak_gib()}

    def log(self, event: str, **values) -> None:
        """One JSON line for every figure printed."""
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")

    def keep_harnesses(self, sources: Sequence[str]) -> Sequence[str]:
        """Each harness that is rolled out, by the hash of its syntax tree -> the same sources."""
        for source in sources:
            path = self.folder / "harnesses" / f"{check.name_of(source)}.py"
            if not path.exists():
                journal.write(path, source)
        return sources

    def archive(self, phase: str) -> Path:
        return self.folder / "archive" / phase_folder(phase)

    # Full states and weights -----------------------------------------------------------------------------------------

    def finish_phase(self, phase: str, policy, optimizer) -> None:
        self.state.finished.append(phase)
        journal.sync(self.folder / "log.jsonl")
        self.full_state |= {"state": asdict(self.state), "log_bytes": self.log_bytes()}
        self._save_full_state(phase_folder(phase), policy, optimizer)

    def checkpoint(self, phase: str, policy, optimizer, minutes: float) -> None:
        """A full state inside a phase, so many minutes after the last one."""
        if self.trained == self.state.s and time.monotonic() - self.saved >= 60 * minutes:
            self._save_full_state(f"{phase_folder(phase)}_step_{self.trained:04d}", policy, optimizer)

    def _save_full_state(self, name: str, policy, optimizer) -> None:
        self.full_state |= {"trained": self.trained, "weights": self.state.theta, "plan": policy.plan()}
        self._save(name, policy, self.full_state, optimizer)
        newest_two = [folder for _, folder in full_states(self.folder)[-2:]]
        for old in self.checkpoints.glob("cycle_*"):
            if old not in newest_two:
                shutil.rmtree(old)
        self.saved = time.monotonic()

    def save_weights(self, name: str, policy) -> None:
        """The weights of a pair that was chosen: best_on_test, training_selected or stagewise_best. On the way through
        what was there before a resume theta is ahead of the loop, and they were saved then."""
        if self.trained == self.state.s:
            self._save(name, policy, {"weights": self.state.theta})

    def _save(self, name: str, policy, about: dict, optimizer=None) -> None:
        """A folder for `from_pretrained`. state.json in it, written last, has the size of every file."""
        half = self.checkpoints / f"{name}{journal.HALF}"
        shutil.rmtree(half, ignore_errors=True)
        policy.save(half)
        if optimizer:
            save_optimizer(optimizer, half / "optimizer.pt")
        files = {path.name: path.stat().st_size for path in half.iterdir()}
        (half / "state.json").write_text(dumps({**about, "files": files}))
        journal.settle(half, self.checkpoints / name)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def read_about(folder: Path) -> dict:
    """config.json of a run folder. ValueError, in one line, unless it is one of this version."""
    for name in ("config.json", "h_0.py"):
        if not (folder / name).is_file():
            raise ValueError(f"expected a run folder, found no {name} in {folder}")
    where = folder / "config.json"
    try:
        about = json.loads(where.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {where}, found it damaged: {error}") from error
    check_fields(where, about, {"config": {}, "versions": {}})
    if about.get("format") != FORMAT:
        raise ValueError(
            f"expected a run folder of format {FORMAT}, found {about.get('format', 'an older one')} in {folder}; go on "
            f"with the commit that began it: {about['versions'].get('commit', 'not recorded')}"
        )
    check_fields(where, about, {"h_0": "", "data": "", "threads": 1})
    return about


def save_optimizer(optimizer, path: Path) -> None:
    with open(path, "wb") as file:
        try:
            torch.save(optimizer.state_dict(), file)
        except RuntimeError as error:  # hides what the disk said
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def full_states(folder: Path) -> list[tuple[dict, Path]]:
    """(state.json, folder) of every full state that is whole, the newest last. Their names begin with cycle_, but for
    the one of theta_0, whose weights are those of --model."""
    found = []
    like = {"state": asdict(State("")), "began": {"config": {}}, "trained": 0, "weights": 0, "log_bytes": 0}
    for path in (folder / "checkpoints").glob("*/state.json"):
        if path.parent.suffix == journal.HALF:
            continue
        about = read_whole(path.parent)
        if about and (path.parent.name == "start" or path.parent.name.startswith("cycle_")):
            check_fields(path, about, like)
            found.append((about, path.parent))
        elif not about:
            print(f"{path.parent}: not whole, going on without it", file=sys.stderr)
    if not found:
        raise ValueError(f"expected a full state in {folder / 'checkpoints'}, found none")
    return sorted(found, key=lambda pair: (len(pair[0]["state"]["finished"]), pair[0]["trained"]))


def read_whole(folder: Path) -> dict | None:
    """state.json of a checkpoint; None where a file of it is damaged or cut."""
    try:
        about = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        check_fields(folder / "state.json", about, {"files": {}})
        return about if all((folder / name).stat().st_size == size for name, size in about["files"].items()) else None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def check_fields(where, found, like: dict) -> None:
    """ValueError, in one line, unless `found` has the fields of `like`, each of the same type, all the way down."""
    if not isinstance(found, dict):
        raise ValueError(f"expected an object in {where}, found {type(found).__name__}")
    for name, value in like.items():
        if type(found.get(name)) is not type(value):
            there = type(found[name]).__name__ if name in found else "nothing"
            raise ValueError(f"expected {name} of type {type(value).__name__} in {where}, found {there}")
        if isinstance(value, dict):
            check_fields(f"{name} of {where}", found[name], value)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def dumps(value) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def phase_folder(phase: str) -> str:
    """A phase 3.weight has the folder name cycle_03_weight."""
    k, name = phase.split(".")
    return f"cycle_{int(k):02d}_{name}"


def peak_gib() -> float:
    """The most memory held since the last call: of the GPU, or without one of this process since its start."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # given in KiB
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def versions() -> dict[str, str]:
    import transformers

    command = ["git", "rev-parse", "HEAD"] if shutil.which("git") else ["false"]
    git = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "commit": git.stdout.strip() if git.returncode == 0 else "not a git checkout",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
    }
