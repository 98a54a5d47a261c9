"""A task that a tiny model can learn in seconds, for tests that need accepted rollouts: puzzles with one answer."""

import csv
from pathlib import Path

import torch
from conftest import ROOT, save_tiny

from domains import chess_puzzles
from model import Policy, Row

MOVE = "f3f7"  # the commonest solution of the built-in puzzles


def save_puzzles(path: Path) -> Path:
    """The built-in one-move puzzles that this move solves: 34."""
    with open(chess_puzzles.BUILT_IN, newline="") as file:
        rows = list(csv.DictReader(file))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row for row in rows if row["Moves"].split()[1:] == [MOVE])
    return path


def save_learner(folder: Path, seed: int = 0) -> Path:
    """A tiny model that answers with this move about every other time, whatever it is asked."""
    policy = Policy.load(str(save_tiny(folder)))
    torch.manual_seed(seed)
    answer = policy._tokens(MOVE) + tuple(policy.eos_ids)
    optimizer = torch.optim.AdamW(policy.trained().values(), lr=3e-3)
    for _ in range(300):
        start = policy._tokens("<|im_end|>\n<|im_start|>assistant\n")
        contexts = [tuple(torch.randint(10, len(policy.tokenizer), (n,)).tolist()) + start for n in (30, 300, 600, 900)]
        rows = [Row(c + answer, (False,) * len(c) + (True,) * len(answer)) for c in contexts]
        loss = -policy.logprobs(rows).sum() / len(rows)
        if loss < 0.7:  # the log-probability of the whole answer
            break
        policy.backward(loss)
        policy.step(optimizer, 1.0)
    policy.save(folder)
    return folder


if __name__ == "__main__":
    save_learner(Path("/tmp/w/learner"))
    save_puzzles(Path("/tmp/w/one_move.csv"))
    print(ROOT)
