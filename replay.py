"""Trace a stored rollout to its tokens: python replay.py RUN [UNIT[:LINE]].

    python replay.py runs/first                                         # the units, and whether their weights are kept
    python replay.py runs/first cycle_00_weight/step_0003.jsonl:17      # one trajectory, token by token
    python replay.py runs/first cycle_00_weight/step_0003.jsonl         # all of a unit, in one batch: the same or not

The harness runs again and the stored weights sample again from the stored seeds. Where the weights of that step are no
longer kept, the stored replies stand in for them: contexts are rendered again, ids and masks are shown, and no more is
claimed. Ends with 1 if any id differs, with 2 if there is nothing to replay.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch

import journal
import rsft
from config import DOMAINS, config_of
from data_types import Task, Trajectory
from harnesses import check
from harnesses.host import Host
from report import marked
from rollout import Limits, Plan, rollout
from run_folder import read_about, read_whole
from sampler import Sample
from whale import digest, load_data, load_policy

NOT_KEPT = "no longer kept, nothing is sampled; contexts are rendered again around the stored replies"


class Replies:
    """A policy that gives the stored replies instead of sampling."""

    def __init__(self, policy, trajectories):
        self.policy, self.turns = policy, {(tau.harness, tau.seed): tau.turns for tau in trajectories}

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def converse(self, requests, answer, positions) -> None:
        while requests:
            requests = answer([(episode, self.reply(episode)) for episode, _ in requests])

    def reply(self, episode) -> Sample:
        turns, n = self.turns[check.name_of(episode.plan.source), episode.plan.seed], len(episode.turns)
        if n == len(turns):
            raise ValueError(f"task {episode.plan.task.id}: the harness asks for more than the {n} stored replies")
        return Sample(list(turns[n].sampled_ids), list(turns[n].logprobs), turns[n].finish)


def weights_of(run: Path, version: int) -> tuple[bool, Path | None]:
    """-> whether the weights after so many rollout steps are kept, the checkpoint (None: they are those of --model)."""
    if version == 0:
        return True, None
    for folder in sorted((run / "checkpoints").iterdir()):
        if (about := read_whole(folder)) and about["weights"] == version and about["files"]:
            return True, folder
    return False, None


def source_of(run: Path, tau: Trajectory) -> str:
    path = run / "harnesses" / f"{tau.harness}.py"
    if not path.is_file():
        raise ValueError(f"expected the harness of this trajectory at {path}, found none")
    return path.read_text(encoding="utf-8")


def again(run: Path, stored: list[Trajectory], cfg, policy, data) -> list[Trajectory]:
    tasks: dict[str, Task] = {task.id: task for task in (*data.weight, *data.harness, *data.test)}
    todo = [Plan(source_of(run, tau), tasks[tau.task_id], tau.sample, tau.seed) for tau in stored]
    with Host() as host:
        domain = importlib.import_module(DOMAINS[cfg.domain])
        return rollout(policy, host, domain, todo, Limits(cfg.prompt_limit, cfg.response_limit))


def ids_of(tau: Trajectory) -> list:
    return [(turn.context_ids, turn.sampled_ids) for turn in tau.turns]


def show(policy, tau: Trajectory, weights_kept: bool) -> None:
    """The conversation, ids and masks as trained, and each sampled token's log-probability, then and now."""
    rows = rsft.training_sequences(tau)
    print(f"R = {tau.reward}, ended by {tau.stop}" + (f": {tau.error}" if tau.error else ""))
    sampled = iter([logprob for turn in tau.turns for logprob in turn.logprobs])
    with torch.no_grad():
        trained = iter(policy.logprobs(rows).tolist() if weights_kept and rows else [])
    for number, row in enumerate(rows, start=1):
        print(f"\nrow {number} of {len(rows)}: {len(row.ids)} tokens, {sum(row.mask)} of them sampled\n")
        print(f"{marked(policy, row)}\n")
        for mask, places in groupby(range(len(row.ids)), key=lambda place, row=row: row.mask[place]):
            if not mask:
                print("mask 0:", *(row.ids[place] for place in places))
                continue
            print("mask 1:   place      id  log p sampled  log p trained  token")
            for place in places:
                text = repr(policy.tokenizer.decode([row.ids[place]]))
                now = f"{next(trained):13.6f}" if weights_kept else " " * 13
                print(f"{place:15}{row.ids[place]:8}{next(sampled):15.6f}  {now}  {text}")


def listing(run: Path) -> Iterator[str]:
    for path in sorted((run / "rollouts").rglob("*.jsonl")):
        about = journal.read_unit(Trajectory, path)[1]
        kept, folder = weights_of(run, about["weights"])
        where = (folder.name if folder else "--model") if kept else "not kept"
        name = path.relative_to(run / "rollouts")
        yield f"{name}: {about['records']} rollouts, weights after {about['weights']} rollout steps: {where}"


def replay(run: Path, name: str) -> int:
    unit, _, line = name.partition(":")
    stored, about = journal.read_unit(Trajectory, run / "rollouts" / unit)
    if line and not (line.isdecimal() and 0 < int(line) <= len(stored)):
        raise ValueError(f"expected a line from 1 to {len(stored)} after {unit}:, found {line!r}")
    chosen = [int(line)] if line else list(range(1, len(stored) + 1))
    stored = [stored[number - 1] for number in chosen]
    settings = read_about(run)
    cfg = config_of(settings["config"], {})
    data = load_data(cfg, importlib.import_module(DOMAINS[cfg.domain]))
    if digest(data) != settings["data"]:
        raise ValueError(f"expected the puzzles that the run began with, found others: {cfg.puzzles or 'built-in'}")
    torch.set_num_threads(settings["threads"])
    kept, folder = weights_of(run, about["weights"])
    policy = load_policy(cfg, folder)
    print(f"weights after {about['weights']} rollout steps: {folder or cfg.model if kept else NOT_KEPT}")
    found = again(run, stored, cfg, policy if kept else Replies(policy, stored), data)
    for number, tau, new in zip(chosen, stored, found, strict=True):
        same = ids_of(tau) == ids_of(new) and (tau.reward, tau.stop) == (new.reward, new.stop)
        tokens = f"{tau.sampled_tokens} sampled tokens in {len(tau.turns)} turns"
        verdict = ("the same ids" if kept else "the same contexts") if same else "OTHER IDS OR ANOTHER END"
        print(f"{unit}:{number} task {tau.task_id}, harness {tau.harness}: {tokens}, {verdict}")
        if line:
            show(policy, tau, kept)
        if not same:
            print(f"stored: {ids_of(tau)}\nfound:  {ids_of(new)}")
            return 1
    return 0


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("trajectory", nargs="?", help="UNIT:LINE, or UNIT for all of it; none: list the units")
    args = parser.parse_args(argv)
    try:
        if args.trajectory:
            return replay(args.run, args.trajectory)
        read_about(args.run)
        print(*listing(args.run), sep="\n")
    except (ValueError, OSError) as error:
        print(f"replay.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
