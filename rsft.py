"""ModelUpdate: online rejection-sampling fine-tuning (Section 3.1). Collect under a frozen theta_old, accept R = 1,
ascend Eq. 2 over minibatches of what was accepted, once."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from data_types import Task, Trajectory
from model import Row
from rollout import Limits, plans, rollout


@dataclass(frozen=True)
class Step:
    """What one optimizer step did."""

    objective: float | None  # Eq. 2, before the step; None if that was not finite
    gradient_norm: float | None  # before clipping; None if that was not finite
    tokens: int  # model-generated tokens of the minibatch
    row_tokens: int  # all tokens of its rows, without padding; a row that came several times is computed once
    trajectories: int
    micro_tokens: int  # padded tokens of a micro-batch, at most
    checkpointing: bool  # whether activations were made again in the backward pass
    stepped: bool  # False: the gradient was not finite, and theta stayed as it was


def collect(policy, host, domain, h: str, B_s: Sequence[Task], G: int, limits: Limits, *names, progress=None):
    """Sample G trajectories per prompt under (theta_old, h) -> all of them. theta_old needs no copy: nothing steps
    until the batch is whole."""
    return rollout(policy, host, domain, plans(h, B_s, G, *names), limits, progress)


def accepted(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """S_plus: those that the verifier accepts."""
    return [tau for tau in trajectories if tau.reward == 1]


def training_sequences(tau: Trajectory) -> list[Row]:
    """The rows of a trajectory: the ids that the model saw and sampled, never text encoded again, with True at I(tau).

    Where a turn's context extends the turn before, both share a row. Where the harness (or the chat template) rewrote
    the history, a new row begins with exactly the context that was seen.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    for turn in tau.turns:
        context = list(turn.context_ids)
        if rows and context[: len(rows[-1][0])] == rows[-1][0]:
            ids, mask = rows[-1]
            mask += [False] * (len(context) - len(ids))
            ids += context[len(ids) :]
        else:
            ids, mask = context, [False] * len(context)
            rows.append((ids, mask))
        ids += turn.sampled_ids
        mask += [True] * len(turn.sampled_ids)
    return [Row(tuple(ids), tuple(mask)) for ids, mask in rows]


def j_weight(policy, rows: Mapping[Row, int], tokens: int) -> torch.Tensor:
    """Eq. 2, the part of these rows: () with gradient. A row that several trajectories share, as samples of one prompt
    often do, is computed once and counts that many times. `tokens` is sum |I(tau)| over the whole minibatch, so that
    parts add up to the same value and gradient however the minibatch is split."""
    logprobs = policy.logprobs(list(rows))  # (N,)
    counts = torch.tensor([float(n) for row, n in rows.items() for _ in range(sum(row.mask))])  # (N,)
    return logprobs @ counts.to(logprobs.device) / tokens


def ascend(
    policy, optimizer, S_plus: Sequence[Trajectory], minibatch: int, micro_tokens: int, max_norm: float, seed: int
):
    """One epoch over S_plus in minibatches of |M| trajectories -> a Step for each. The last, short one is kept and
    normalised by its own tokens. Nothing accepted: no step, and Adam's count stays."""
    order = list(S_plus)
    random.Random(seed).shuffle(order)
    steps = []
    for start in range(0, len(order), minibatch):
        M = order[start : start + minibatch]
        rows = Counter(row for tau in M for row in training_sequences(tau))
        tokens = sum(n * sum(row.mask) for row, n in rows.items())  # sum of |I(tau)|
        if not tokens:
            continue
        J = gradient(policy, rows, tokens, micro_tokens)  # Eq. 2
        stepped, norm = policy.step(optimizer, max_norm)
        row_tokens, largest = sum(len(row.ids) for row in rows), min(micro_tokens, policy.fitting_tokens)
        J, norm = (x if math.isfinite(x) else None for x in (J, norm))
        steps.append(Step(J, norm, tokens, row_tokens, len(M), largest, policy.checkpointing, stepped))
    return steps


def gradient(policy, rows: Mapping[Row, int], tokens: int, micro_tokens: int) -> float:
    """Eq. 2 of a minibatch -> its value; its gradient is left in theta. When the GPU runs out of memory the minibatch
    begins again with less memory in use, so that what is stepped on is always the gradient of all rows."""
    while True:
        J = 0.0
        for part in micro_batches(rows, min(micro_tokens, policy.fitting_tokens)):
            try:
                J += accumulate(policy, {row: rows[row] for row in part}, tokens)
            except torch.cuda.OutOfMemoryError:
                break  # the error holds the activations until its block is left
        else:
            return float(J)
        policy.save_memory(part)


def accumulate(policy, part: Mapping[Row, int], tokens: int) -> torch.Tensor:
    """Add the gradient of these rows' part of Eq. 2 to theta's -> its value, (), which is not waited for."""
    J = j_weight(policy, part, tokens)
    policy.backward(-J)
    return J.detach()


def micro_batches(rows: Iterable[Row], micro_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar length together, padded size at most `micro_tokens` (a single longer row goes alone)."""
    part: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if part and (len(part) + 1) * len(row.ids) > micro_tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part
