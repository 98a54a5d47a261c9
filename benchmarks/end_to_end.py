"""Where the time of a weight phase goes, and how the samplers compare: python benchmarks/end_to_end.py --puzzles FILE

Rollout steps of the preset on real puzzles with the real model: rollouts per second, and the share of wall time of
sampling, of harnesses and environments (part of it hidden by the GPU's work), and of training. Both samplers start from
the same weights and draw the same seeds; each step is timed alone.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import rollout
import rsft
from config import PRESETS, Config
from domains import chess_puzzles as domain
from harnesses.host import Host
from model import Policy
from rollout import Limits, seed_of
from whale import Sampler, initial_harness, load_data


class Stopwatch:
    """Adds up the seconds that a function takes."""

    def __init__(self, function):
        self.function, self.seconds = function, 0.0

    def __call__(self, *args):
        start = time.perf_counter()
        try:
            return self.function(*args)
        finally:
            self.seconds += time.perf_counter() - start


def phase(cfg: Config, name: str, steps: int, data) -> list[dict]:
    """`steps` rollout steps with one sampler -> the seconds of each stage of each step."""
    policy = Policy.load(cfg.model, top_k=cfg.top_k, sampler=name)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr, weight_decay=0.0)
    h, tasks = initial_harness(cfg, domain).read_text(), Sampler(data.weight, cfg.seed)
    measured, advance = [], rollout.advance
    with Host() as host:
        for s in range(steps):
            rollout.advance = beside = Stopwatch(advance)
            start = time.perf_counter()
            limits = Limits(cfg.prompt_limit, cfg.response_limit)
            trajectories = rsft.collect(policy, host, domain, h, tasks.next(cfg.B), cfg.G, limits, s)
            S_plus = rsft.accepted(trajectories)
            sampled = time.perf_counter()
            rsft.ascend(policy, optimizer, S_plus, cfg.minibatch, cfg.micro_tokens, cfg.max_norm, seed_of(s))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            end = time.perf_counter()
            measured.append({"rollouts": len(trajectories), "accepted": len(S_plus), "collect": sampled - start,
                             "beside": beside.seconds, "train": end - sampled,
                             "tokens": sum(tau.sampled_tokens for tau in trajectories)})  # fmt: skip
            m = measured[-1]
            print(f"{name} step {s}: {m['rollouts']} rollouts, {m['accepted']} accepted, {m['tokens']} tokens,",
                  f"collect {m['collect']:.1f} s, of it harnesses {m['beside']:.1f} s, train {m['train']:.1f} s",
                  flush=True)  # fmt: skip
    rollout.advance = advance
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="mini" if torch.cuda.is_available() else "smoke")
    parser.add_argument("--puzzles", default="")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=4, help="with the slots; the first warms up and is not counted")
    parser.add_argument("--plain-steps", type=int, default=1)
    args = parser.parse_args()
    cfg = Config("chess", **PRESETS[args.preset] | {"puzzles": args.puzzles, "model": args.model})
    data = load_data(cfg, domain)
    sides = {"slots": phase(cfg, "slots", args.steps, data)[1:], "plain": phase(cfg, "plain", args.plain_steps, data)}
    print("\n| sampler | rollouts/s | sampling | harnesses and environments | training |\n|---|---|---|---|---|")
    for name, steps in sides.items():
        rate = statistics.median(m["rollouts"] / m["collect"] for m in steps)
        whole = sum(m["collect"] + m["train"] for m in steps)
        shares = [sum(stage(m) for m in steps) / whole for stage in (
            lambda m: m["collect"] - m["beside"], lambda m: m["beside"], lambda m: m["train"])]  # fmt: skip
        print(f"| {name} | {rate:.1f} | " + " | ".join(f"{100 * share:.0f}%" for share in shares) + " |")


if __name__ == "__main__":
    main()
