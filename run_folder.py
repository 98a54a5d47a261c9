"""What a run leaves on disk: config.json, log.jsonl, rollouts.jsonl, archive/, checkpoints/ and state.json."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from data_types import Trajectory

JSON_LINES = ("log.jsonl", "rollouts.jsonl")


@dataclass
class State:
    """All that the loop carries from phase to phase, besides theta and the optimizer."""

    h: str  # source of the current harness
    drawn: int = 0  # prompts drawn from D_weight so far
    s: int = 0  # rollout steps so far
    searched: int = 0  # harness-search iterations so far
    rollouts: dict[str, int] = field(default_factory=lambda: {"train": 0, "search": 0, "incumbent": 0, "test": 0})
    pairs: list[dict] = field(default_factory=list)  # every measured (theta, h)
    finished: list[str] = field(default_factory=list)  # phases, as "0.weight"

    def is_due(self, phase: str, budget: float) -> bool:
        """Not finished before a resume, and the rollouts are not spent."""
        return phase not in self.finished and self.spent < budget

    @property
    def spent(self) -> int:
        """Rollouts as the paper counts them: training plus candidates; the incumbent's and the test's are apart."""
        return self.rollouts["train"] + self.rollouts["search"]


class Run:
    """One run folder. A phase is the unit that a resume goes on from: state.json is replaced at once, last of all."""

    def __init__(self, folder: Path, state: State, config: dict):
        self.folder, self.state, self.config = folder, state, config

    @classmethod
    def create(cls, folder: Path, config: dict, h_0: str) -> "Run":
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--out: expected a new or empty folder, found {folder}; is it a run to --resume?")
        folder.mkdir(parents=True, exist_ok=True)
        run = cls(folder, State(h=h_0), config)
        run._replace(
            "config.json", json.dumps({"config": config, "versions": versions()}, indent=1, default=str) + "\n"
        )
        (folder / "h_0.py").write_text(h_0)
        return run

    @classmethod
    def resume(cls, folder: Path) -> "Run":
        """Go on from the last finished phase; what an unfinished phase left is dropped."""
        if not (folder / "config.json").exists():
            raise ValueError(f"--resume: expected a run folder, found no config.json in {folder}")
        config = read_json(folder / "config.json")["config"]
        if (folder / "state.json").exists():
            stored = read_json(folder / "state.json")
            sizes, state = stored.pop("sizes"), State(**stored)
        else:
            sizes, state = dict.fromkeys(JSON_LINES, 0), State(h=(folder / "h_0.py").read_text())
        run = cls(folder, state, config)
        for name, size in sizes.items():
            found = (folder / name).stat().st_size if (folder / name).exists() else 0
            if found < size:
                raise ValueError(f"--resume: expected at least {size} bytes in {folder / name}, found {found}")
            if found:
                os.truncate(folder / name, size)
        for left in (folder / "archive").glob("*"):
            if left.name not in {phase_folder(phase) for phase in run.state.finished}:
                shutil.rmtree(left)
        return run

    def log(self, event: str, **values) -> None:
        """One JSON line for every figure printed."""
        self._append("log.jsonl", [json.dumps({"event": event, **values}, allow_nan=False)])

    def keep(self, where: dict, trajectories: Iterable[Trajectory]) -> None:
        """One JSON line for every rollout, with what it was for."""
        lines = [json.dumps({**where, **asdict(tau)}) for tau in trajectories]
        self._append("rollouts.jsonl", lines)

    def finish_phase(self, phase: str, policy, optimizer) -> None:
        """Write theta and the optimizer whole, then flip state.json; the checkpoint of the phase before goes last."""
        before = self.state.finished[-1:]
        self.state.finished.append(phase)
        self._save(phase_folder(phase), policy, optimizer)
        sizes = {name: (self.folder / name).stat().st_size for name in JSON_LINES}  # a resume cuts what came after
        self._replace("state.json", json.dumps({**asdict(self.state), "sizes": sizes}, indent=1) + "\n")
        for old in before:
            shutil.rmtree(self.checkpoint(old))

    def save_weights(self, name: str, policy) -> None:
        """The weights of a measured pair that was chosen: best_on_test or training_selected."""
        self._save(name, policy)

    def save_harness(self, name: str, source: str) -> None:
        (self.folder / "harnesses").mkdir(exist_ok=True)
        (self.folder / "harnesses" / f"{name}.py").write_text(source)

    def _save(self, name: str, policy, optimizer=None) -> None:
        folder, half = self.folder / "checkpoints" / name, self.folder / "checkpoints" / "half-written"
        shutil.rmtree(half, ignore_errors=True)
        policy.save(half)
        if optimizer:
            torch.save(optimizer.state_dict(), half / "optimizer.pt")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(half, folder)

    @property
    def last_checkpoint(self) -> Path | None:
        return self.checkpoint(self.state.finished[-1]) if self.state.finished else None

    def checkpoint(self, phase: str) -> Path:
        return self.folder / "checkpoints" / phase_folder(phase)

    def archive(self, phase: str) -> Path:
        return self.folder / "archive" / phase_folder(phase)

    def _append(self, name: str, lines: list[str]) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))

    def _replace(self, name: str, text: str) -> None:
        half = self.folder / f"{name}.half"
        with open(half, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, self.folder / name)


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--resume: expected JSON in {path}, found it damaged: {error}") from error


def phase_folder(phase: str) -> str:
    """A phase 3.weight has the folder name cycle_03_weight."""
    k, name = phase.split(".")
    return f"cycle_{int(k):02d}_{name}"


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
