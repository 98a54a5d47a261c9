"""WHALE: alternate model training under a fixed harness with harness search under a fixed model (Algorithms 1 and 2).

`A1 l.5` marks line 5 of the paper's Algorithm 1, `A2 l.15` line 15 of Algorithm 2. All methods are this one loop: a
method is a row of `schedule`. Where the paper is silent, the README's table of deviations says what was chosen.
"""

import argparse
import importlib
import math
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch

import metaharness
import report
import rsft
import sandbox
from config import DOMAINS, METHODS, PRESETS, PROPOSERS, Config, build_config, chosen, config_of
from data_types import Candidate, Task, Trajectory
from harnesses import check
from harnesses.host import Host
from metaharness import Archive
from model import Policy
from proposers.catalogue import NOTICE, Catalogue
from rollout import MAX_LIVE, Limits, plans, rollout, seed_of
from run_folder import Run, sha256


class Fixed:
    """Algorithm 1: a phase ends after n signals."""

    def __init__(self, n: int):
        self.n, self.t = n, 0

    def __call__(self, signal: float) -> bool:
        self.t += 1
        return self.t >= self.n


class Patience:
    """Algorithm 2: a phase ends once t >= minimum and the signal has set no new best for `patience` calls."""

    def __init__(self, minimum: int, patience: int):
        self.minimum, self.patience = minimum, patience
        self.t, self.t_best, self.best = 0, 0, -math.inf

    def __call__(self, signal: float) -> bool:
        self.t += 1
        if signal > self.best:  # A2 l.8, l.18: any margin counts, a tie does not
            self.best, self.t_best = signal, self.t  # A2 l.9, l.19
        return self.t >= self.minimum and self.t - self.t_best >= self.patience  # A2 l.11, l.21


def steps_of(epochs: Fraction, N: int, B: int) -> int:
    """Rollout steps of a span of D_weight: ceil(epochs N / B) in exact arithmetic, at least 1."""
    return max(1, math.ceil(epochs * N / B))


def schedule(cfg: Config, N: int) -> Iterator[tuple]:
    """One (weight stop, harness stop) per cycle; None skips the phase. j counts the evaluation of h_init as the first
    signal, so Algorithm 1's I iterations are I + 1 signals; Algorithm 2's t > T_min is t >= T_min + 1."""
    steps = partial(steps_of, N=N, B=cfg.B)

    def weight(E):
        return Patience(steps(cfg.T_min) + 1, steps(cfg.P_w)) if cfg.adaptive else Fixed(steps(E))

    def harness(I):  # noqa: E741
        return Patience(cfg.J_min, cfg.P_h) if cfg.adaptive else Fixed(I + 1)

    match cfg.method:
        case "whale" | "fst":
            for _ in range(cfg.cycles):
                yield weight(cfg.E), harness(cfg.I)
        case "weight-only":
            yield weight(cfg.E_total), None
        case "harness-only":
            yield None, harness(cfg.I_total)
        case "stagewise":
            yield weight(cfg.E_total), None
            yield None, harness(cfg.I_total)


def rollout_budget(cfg: Config, N: int, n_harness: int) -> float:
    """Training plus search rollouts of the fixed schedule (E, I): once an adaptive run has spent them, no phase begins.
    Other methods run their phases whatever they cost."""
    if not cfg.adaptive or cfg.method not in ("whale", "fst"):
        return math.inf
    return cfg.cycles * (steps_of(cfg.E, N, cfg.B) * cfg.B * cfg.G + cfg.I * cfg.M * n_harness)


def scope_of(cfg: Config) -> str:
    """FST is WHALE with the proposer and the archive confined to the two prompts."""
    return "prompts" if cfg.method == "fst" else "harness"


class Sampler:
    """The persistent stream over D_weight: epoch after epoch, each in an order of its own."""

    def __init__(self, tasks: Sequence[Task], seed: int, drawn: int = 0):
        self.tasks, self.seed, self.drawn = tasks, seed, drawn

    def next(self, B: int) -> list[Task]:
        batch = [self._at(i) for i in range(self.drawn, self.drawn + B)]
        self.drawn += B
        return batch

    def _at(self, i: int) -> Task:
        epoch, place = divmod(i, len(self.tasks))
        order = list(range(len(self.tasks)))
        random.Random(seed_of(self.seed, "epoch", epoch)).shuffle(order)
        return self.tasks[order[place]]


# The right margin holds the paper's line numbers.
# fmt: off
def whale(cfg: Config, run: Run, policy, optimizer, domain, data, host, proposer) -> None:
    """Algorithms 1 and 2, and the baselines. What is paid for goes through `run.once` and `run.update`: after a kill it
    is read instead, and the loop comes to where it was."""
    state, N, limits = run.state, len(data.weight), Limits(cfg.prompt_limit, cfg.response_limit)
    sampler = Sampler(data.weight, cfg.seed, state.drawn)
    measure = partial(measure_pair, cfg, run, policy, domain, data.test, host, limits)
    admit, budget = admission(cfg, run, domain, data), rollout_budget(cfg, N, len(data.harness))
    if not state.pairs:
        measure("init", None)
    for k, (weight_stop, harness_stop) in enumerate(schedule(cfg, N)):                      # A1 l.1     A2 l.1

        if weight_stop and state.is_due(f"{k}.weight", budget):  # Eq. 4: ModelUpdate       # A1 l.2     A2 l.2
            window, best = deque(maxlen=steps_of(cfg.W, N, cfg.B)), -math.inf
            while True:                                                                     # A1 l.3     A2 l.3
                names, unit = (cfg.seed, "weight", state.s), f"cycle_{k:02d}_weight/step_{state.s + 1:04d}"
                B_s = sampler.next(cfg.B)                                                   # A1 l.3-4   A2 l.4
                with report.progress(cfg.B * cfg.G, f"cycle {k} step {state.s + 1}") as bar:
                    trajectories, sampled = run.once(Trajectory, unit, rsft.collect,        # A1 l.5     A2 l.5
                        policy, host, domain, state.h, B_s, cfg.G, limits, *names, progress=bar)
                S_plus = rsft.accepted(trajectories)                                        # A1 l.5     A2 l.5
                steps, updated = run.update(unit, rsft.ascend, policy, optimizer, S_plus,   # A1 l.6     A2 l.6
                    cfg.minibatch, cfg.micro_tokens, cfg.max_norm, seed_of(*names, "order"))
                window.append(len(S_plus) / len(trajectories))
                r_bar = sum(window) / len(window)                                           #            A2 l.7
                state.drawn, state.s = sampler.drawn, state.s + 1
                state.theta = state.s
                state.count("train", trajectories, sampled)
                state.seconds["updates"] += updated["seconds"]
                report.weight_step(run, k, trajectories, steps, r_bar, sampled, updated)
                if cfg.method == "stagewise" and r_bar > best:  # 6.2.1: the best point by training score
                    best, theta_best = r_bar, state.s
                    run.save_weights("stagewise_best", policy)
                stop = weight_stop(r_bar)                                                   # A1 l.7     A2 l.8-11
                if stop and cfg.method == "stagewise":
                    state.theta, r_bar = theta_best, best
                    policy.restore(run.checkpoints / "stagewise_best")
                if stop or (cfg.eval_steps and state.s % cfg.eval_steps == 0):
                    measure(f"{k}.weight", r_bar)
                if stop:
                    break
                run.checkpoint(f"{k}.weight", policy, optimizer, cfg.checkpoint_minutes)
            run.finish_phase(f"{k}.weight", policy, optimizer)                              # A1 l.8     A2 l.12

        if harness_stop and state.is_due(f"{k}.harness", budget):  # Eq. 4: HarnessSearch
            archive, j = Archive(run.archive(f"{k}.harness")), 0                            # A1 l.9     A2 l.13
            unit = f"cycle_{k:02d}_harness/search_{{:02d}}".format
            C_j = [Candidate(state.h, "incumbent", "h_init of this phase", None)]           # A1 l.8     A2 l.12
            while True:                                                                     # A1 l.9     A2 l.14
                fresh = admit(archive, C_j) if j else C_j
                sources = run.keep_harnesses([candidate.source for candidate in fresh])
                with report.progress(len(fresh) * len(data.harness), f"cycle {k} search {j}") as bar:
                    trajectories, sampled = run.once(Trajectory, unit(j), metaharness.evaluate,
                        policy, host, domain, sources, data.harness, limits, cfg.seed, "harness", k, progress=bar)
                E_j = metaharness.artifacts(trajectories, len(data.harness))                # A1 l.11    A2 l.13, 16
                for candidate, e_h in zip(fresh, E_j, strict=True):
                    archive.add(candidate, e_h)                                             # A1 l.12    A2 l.17
                state.h = archive.best.source  # h_accept                                   # A1 l.13    A2 l.22
                state.count("search" if j else "incumbent", trajectories, sampled)
                report.search_iteration(run, k, j, archive, len(C_j))
                stop = harness_stop(archive.J_best)                                         # A1 l.14    A2 l.18-21
                if stop or (j and cfg.eval_iterations and j % cfg.eval_iterations == 0):
                    measure(f"{k}.harness", archive.J_best)
                if stop:
                    break
                j, state.searched = j + 1, state.searched + 1                               #            A2 l.15
                C_j, proposed = run.once(                                                   # A1 l.10    A2 l.15
                    Candidate, unit(j), proposer.propose, archive, cfg.M, f"{k}.{j}")
                state.seconds["proposals"] += proposed["seconds"]
            run.finish_phase(f"{k}.harness", policy, optimizer)                             # A1 l.15    A2 l.22
    report.final(run)                                                                       # A1 l.17    A2 l.24
# fmt: on


def admission(cfg: Config, run: Run, domain, data):
    """-> Archive.admit with what a candidate of this run may not do: leave its scope, or quote its exam."""
    exam = [phrase for task in (*data.harness, *data.test) for phrase in domain.exam_phrases(task)]
    return partial(Archive.admit, scope=scope_of(cfg), h_0=(run.folder / "h_0.py").read_text(), exam_phrases=exam)


def measure_pair(cfg: Config, run: Run, policy, domain, D_test, host, limits, phase: str, signal: float | None) -> None:
    """mean@n of (theta, h) on D_test, with the same seeds at every look; weights of the best looks are kept."""
    state = run.state
    with report.progress(len(D_test) * cfg.test_samples, f"test after {phase}: rollouts") as bar:
        todo = plans(state.h, D_test, cfg.test_samples, cfg.seed, "test")
        unit = f"test_{len(state.pairs):03d}"
        trajectories, sampled = run.once(Trajectory, unit, rollout, policy, host, domain, todo, limits, bar)
    if not state.pairs:
        report.episode(policy, trajectories[0])
    state.count("test", trajectories, sampled)
    e_h = metaharness.artifact(trajectories)
    report.pair(run, phase, e_h, signal, check.name_of(state.h))
    for choice in ("best_on_test", "training_selected"):
        if len(state.pairs) > 1 and report.choose(state.pairs, choice) is state.pairs[-1]:
            run.save_weights(choice, policy)


def dry_run(cfg: Config, data) -> None:
    """Steps and rollouts of every phase; an adaptive run's are the least it can do, and its limit."""
    N, n = len(data.weight), len(data.harness)
    print(f"N = {N} prompts to train on, {n} to score harnesses on, {len(data.test)} to test on")
    for k, (weight, harness) in enumerate(schedule(cfg, N)):
        steps = weight and (weight.n if isinstance(weight, Fixed) else weight.minimum)
        signals = harness and (harness.n if isinstance(harness, Fixed) else harness.minimum)
        parts = [f"{steps} rollout steps of {cfg.B} x {cfg.G} = {steps * cfg.B * cfg.G} rollouts"] if steps else []
        if signals:
            rollouts = (signals - 1) * cfg.M * n
            parts.append(
                f"{signals - 1} search iterations of {cfg.M} x {n} = {rollouts} rollouts, {n} for the incumbent"
            )
        print(f"cycle {k}: {'at least ' if cfg.adaptive else ''}{'; '.join(parts)}")
    print(
        f"each test: {len(data.test)} x {cfg.test_samples} rollouts; a rollout has at most {cfg.response_limit} tokens"
    )
    if (budget := rollout_budget(cfg, N, n)) < math.inf:
        print(f"begins no phase after {budget} rollouts")


def load_data(cfg: Config, domain):
    return domain.load(
        cfg.puzzles or None,
        sizes=(cfg.n_weight, cfg.n_harness, cfg.n_test),
        seed=cfg.seed,
        themes=tuple(filter(None, cfg.themes.split(","))),
        rating=(cfg.min_rating or None, cfg.max_rating or None),
        moves=(1, cfg.moves),
        max_legal=cfg.max_legal or None,
    )


def digest(data) -> str:
    """SHA-256 of what is trained, searched and tested on."""
    tasks = (*data.weight, *data.harness, *data.test)
    return sha256(repr([(task.id, task.observation, task.reference) for task in tasks]))


def initial_harness(cfg: Config, domain) -> Path:
    """h_0: the domain's, or the file for models too small to follow it, or any file."""
    named = {"": domain.HARNESS, "small": domain.SMALL_MODEL_HARNESS}.get(cfg.harness)
    path = Path(__file__).parent / named if named else Path(cfg.harness)
    if not path.is_file():
        raise ValueError(f"--set harness: expected `small` or a harness file, found {cfg.harness!r}")
    if wrong := check.problem(path.read_text()):
        raise ValueError(f"--set harness: {path}: {wrong}")
    return path


def arguments(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--domain", help=f"one of {', '.join(DOMAINS)}")
    parser.add_argument("--method", help=f"one of {', '.join(METHODS)}")
    parser.add_argument("--adaptive", action="store_true", default=None, help="phases end by patience (Algorithm 2)")
    parser.add_argument("--preset", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--model", help="smollm2-135m, a Hub id or a local folder")
    parser.add_argument("--proposer", help=f"one of {', '.join(PROPOSERS)}")
    parser.add_argument("--puzzles", help="lichess_db_puzzle.csv or .csv.zst; without it the built-in puzzles")
    parser.add_argument("--out", type=Path, help="run folder; without it runs/DOMAIN-METHOD-TIME")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on from where this run was")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cycles", type=int)
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank (needs peft and a higher --set lr)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting of Config")
    parser.add_argument("--dry-run", action="store_true", help="print what a run would cost, load no model")
    args = parser.parse_args(argv)
    if args.resume and args.out:
        parser.error("--resume goes on in its own folder; give no --out beside it")
    return args


def load_policy(cfg: Config, checkpoint: Path | None) -> Policy:
    """theta of --model, or of a checkpoint."""
    policy = Policy.load(
        str(cfg.model if cfg.lora or not checkpoint else checkpoint),  # adapters stand on the first model's weights
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        sampler=cfg.sampler,
        lora=cfg.lora,
        replies=min(MAX_LIVE, max(cfg.B * cfg.G, cfg.M * cfg.n_harness, cfg.n_test * cfg.test_samples)),
    )
    if checkpoint and cfg.lora:
        policy.restore(checkpoint)
    return policy


def load_theta(cfg: Config, run: Run | None):
    """theta and its optimizer, of --model or of the newest full state: AdamW without weight decay at a constant rate,
    its state carried across cycles."""
    checkpoint = run.last_checkpoint if run else None
    policy = load_policy(cfg, checkpoint)
    theta = policy.trained().values()
    optimizer = torch.optim.AdamW(theta, lr=cfg.lr, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    if checkpoint:
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))
        policy.follow(run.full_state["plan"])
    return policy, optimizer


def prepare(args: argparse.Namespace):
    """Everything that bad input can break -> (config, run, theta, optimizer, domain, data), or None after a dry run."""
    run = Run.resume(args.resume) if args.resume else None
    cfg = config_of(run.config, chosen(args)) if run else build_config(args)
    domain = importlib.import_module(DOMAINS[cfg.domain])
    h_0 = run.folder / "h_0.py" if run else initial_harness(cfg, domain)
    data = load_data(cfg, domain)
    if len(data.weight) < cfg.n_weight:
        print(f"N = {len(data.weight)} puzzles to train on, fewer than n_weight = {cfg.n_weight}", flush=True)
    if args.dry_run:
        return dry_run(cfg, data)
    if run:
        run.rewind(digest(data))
    policy, optimizer = load_theta(cfg, run)
    if not run:
        folder = args.out or Path("runs") / f"{cfg.domain}-{cfg.method}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = Run.create(folder, asdict(cfg), h_0.read_text(), digest(data))
    print(f"run folder: {run.folder}\nmodel: {cfg.model}\nh_0: {h_0.name}\n{sandbox.describe()}\n{NOTICE}", flush=True)
    return cfg, run, policy, optimizer, domain, data


def main(argv=None) -> int:
    sys.stdout.reconfigure(errors="replace")  # an episode may hold what the terminal can't show
    args = arguments(argv)
    try:
        ready = prepare(args)
    except (ValueError, OSError) as error:
        print(f"whale.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if ready is None:
        return 0
    cfg, run, *rest = ready
    try:
        with Host() as host:
            whale(cfg, run, *rest, host, Catalogue(cfg.seed, scope_of(cfg), cfg.marks))
    except MemoryError as error:
        print(f"whale.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"whale.py: {error}; what was finished is kept, go on with --resume {run.folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; go on with: python whale.py --resume {run.folder}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
