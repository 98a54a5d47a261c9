"""HarnessSearch: Meta-Harness (Section 3.2). Eq. 3 scores a harness; the archive is a folder to browse."""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import journal
from data_types import Artifact, Candidate, Task, Trajectory
from harnesses import check
from rollout import Limits, plans, rollout


def evaluate(
    policy, host, domain, sources: Sequence[str], D_harness: Sequence[Task], limits: Limits, *names, progress=None
) -> list[Trajectory]:
    """What Eq. 3 averages: one trajectory per task for each harness, all rolled out together, one harness after the
    other. Harnesses share their seeds per task, so that scores are paired."""
    todo = [plan for source in sources for plan in plans(source, D_harness, 1, *names)]
    return rollout(policy, host, domain, todo, limits, progress)


def artifacts(trajectories: Sequence[Trajectory], n: int) -> list[Artifact]:
    """e_h of each harness, from the n trajectories of each."""
    return [artifact(trajectories[i : i + n]) for i in range(0, len(trajectories), n)]


def artifact(trajectories: Sequence[Trajectory]) -> Artifact:
    """The mean reward and its standard error over tasks; a rollout that crashed counts as 0, the denominator stays."""
    e_h = Artifact(math.nan, math.nan, tuple(trajectories))
    means = list(e_h.outcomes.values())
    score = sum(means) / len(means)  # Eq. 3
    variance = sum((mean - score) ** 2 for mean in means) / max(len(means) - 1, 1)
    return Artifact(score, math.sqrt(variance / len(means)), tuple(trajectories))


@dataclass(frozen=True)
class Entry:
    """One harness of the archive. `score` is None where nothing was rolled out: a duplicate or a refused candidate."""

    id: str
    source: str
    proposer: str
    hypothesis: str
    parent: str | None
    score: float | None = None
    standard_error: float | None = None
    failure: str | None = None  # why it can't be accepted
    duplicate_of: str | None = None
    against_incumbent: tuple[int, int] | None = None  # tasks won and lost against the incumbent, of the same seeds


class Archive:
    """A_j and E_j of one harness phase. Seeded with h_init, it only grows."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: list[Entry] = []
        self.artifacts: dict[str, Artifact] = {}
        self.trees: dict[str, str] = {}  # syntax tree -> id of the entry that has it

    @property
    def best(self) -> Entry:
        """h_accept: the arg max of Eq. 3 over the archive. A tie keeps the earlier entry; NaN never wins."""
        scored = [e for e in self.entries if e.failure is None and e.score is not None and not math.isnan(e.score)]
        return (
            max(scored, key=lambda entry: entry.score) if scored else self.entries[0]
        )  # max keeps the first of equals

    @property
    def J_best(self) -> float:
        return self.best.score if self.best.score is not None else -math.inf

    def admit(self, candidates: Sequence[Candidate], scope: str, h_0: str, exam_phrases: Sequence[str]):
        """Record what needs no rollout (refused, or the same syntax tree as another) -> the candidates to evaluate."""
        fresh: dict[str, Candidate] = {}
        for candidate in candidates:
            failure = check.problem(candidate.source, scope=scope, h_0=h_0, exam_phrases=exam_phrases)
            tree = None if failure else check.tree_hash(candidate.source)
            if failure:
                self.add(candidate, None, failure=failure)
            elif tree in self.trees or tree in fresh:
                self.add(candidate, None, duplicate_of=self.trees.get(tree, "this batch"))
            else:
                fresh[tree] = candidate
        return list(fresh.values())

    def add(self, candidate: Candidate, e_h: Artifact | None, failure=None, duplicate_of=None) -> Entry:
        """Append an entry; its folder is whole before this returns."""
        if e_h is not None and failure is None:
            crashed = [tau.error for tau in e_h.trajectories if tau.stop == "harness_error"]
            if len(crashed) == len(e_h.trajectories):
                failure = f"every episode failed: {(crashed[0].strip().splitlines() or ['no reason given'])[-1]}"
        entry = Entry(
            id=f"{len(self.entries):03d}",
            source=candidate.source,
            proposer=candidate.proposer,
            hypothesis=candidate.hypothesis,
            parent=candidate.parent,
            score=e_h.score if e_h else None,
            standard_error=e_h.standard_error if e_h else None,
            failure=failure,
            duplicate_of=duplicate_of,
            against_incumbent=paired(e_h, self.artifacts[self.entries[0].id]) if e_h and self.artifacts else None,
        )
        self._write(entry, e_h)
        self.entries.append(entry)
        if e_h is not None:
            self.artifacts[entry.id] = e_h
            self.trees[check.tree_hash(candidate.source)] = entry.id
        return entry

    def _write(self, entry: Entry, e_h: Artifact | None) -> None:
        folder = self.folder / entry.id
        journal.write(folder / "harness.py", entry.source)
        parent = next((e.source for e in self.entries if e.id == entry.parent), None)
        if parent is not None:
            change = diff(parent, entry.source, entry.parent, entry.id)
            journal.write(folder / "diff.patch", change)
        if e_h is not None:
            seen = [replace(tau, behaviour=visible(tau.behaviour)) for tau in e_h.trajectories]
            journal.write(folder / "trajectories.jsonl", *map(journal.line_of, seen))
        about = {key: value for key, value in asdict(entry).items() if key != "source"}
        about = {key: None if value != value else value for key, value in about.items()}  # JSON has no NaN
        about["outcomes"] = e_h.outcomes if e_h else None
        journal.write(folder / "entry.json", json.dumps(about, indent=1, allow_nan=False) + "\n")


def visible(behaviour: Mapping) -> dict:
    """What proposers read tells nothing of the hidden reference."""
    return {name: value for name, value in behaviour.items() if name != "reference"}


def paired(e_h: Artifact, incumbent: Artifact) -> tuple[int, int]:
    """On how many tasks it beats the incumbent, and on how many it loses to it."""
    mine, theirs = e_h.outcomes, incumbent.outcomes
    return sum(mine[t] > theirs[t] for t in mine), sum(mine[t] < theirs[t] for t in mine)


def diff(old: str, new: str, old_name: str, new_name: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="")
    return "".join(f"{line}\n" for line in lines)
