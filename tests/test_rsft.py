"""Eq. 2: its value, its one normaliser, and what is and isn't a step."""

import math

import pytest
import torch

import journal
from data_types import StopReason, Trajectory, Turn
from model import Policy, Row
from rsft import Step, ascend, j_weight, micro_batches


def accepted(n: int, length: int = 5, sampled: int = 2) -> list[Trajectory]:
    """n trajectories of different ids and lengths."""
    return [
        Trajectory(f"t{i}", "test", 0, 0, 1, StopReason.DONE, (
            Turn(tuple(10 + (i + j) % 200 for j in range(length + i % 4)),
                 tuple(20 + (3 * i + j) % 200 for j in range(sampled + i % 3)),
                 (0.0,) * (sampled + i % 3), "", "length"),))
        for i in range(n)
    ]  # fmt: skip


def optimizer_of(policy, lr=1e-3):
    return torch.optim.AdamW(policy.model.parameters(), lr=lr, weight_decay=0.0)


class Fixed:
    """log-probabilities given by hand."""

    def __init__(self, *logprobs):
        self.values = {id_: torch.tensor(lp) for id_, lp in enumerate(logprobs)}

    def logprobs(self, rows):
        return torch.cat([self.values[row.ids[0]] for row in rows])


def test_eq_2_divides_once_by_all_sampled_tokens():
    policy, rows = Fixed([-2.0], [-0.5] * 9), [Row((0,), (True,)), Row((1,), (True,) * 9)]
    assert -j_weight(policy, dict.fromkeys(rows, 1), 10) == pytest.approx(0.65)
    assert -sum(j_weight(policy, {row: 1}, 10) for row in rows) == pytest.approx(0.65)  # a mean of means would be 1.25
    assert -j_weight(policy, {rows[0]: 3, rows[1]: 1}, 12) == pytest.approx((3 * 2.0 + 4.5) / 12)


def test_trajectories_that_are_alike_are_computed_once_and_count_as_often_as_they_came(tiny):
    policy = Policy.load(str(tiny()))
    a, b = accepted(2)  # of 2 and 3 sampled tokens

    def step(*taus):
        (step,) = ascend(policy, GradientKeeper(policy), taus, 64, 4096, 1e9, seed=0)
        return step, GradientKeeper.kept

    (of_a, gradient_a), (of_b, gradient_b), (both, gradient) = step(a), step(b), step(a, b, a, a)
    assert both.objective == pytest.approx((6 * of_a.objective + 3 * of_b.objective) / 9, rel=1e-6)
    assert (gradient - (6 * gradient_a + 3 * gradient_b) / 9).abs().max() < 1e-6 * gradient.norm()
    assert (both.tokens, both.trajectories, both.row_tokens) == (9, 4, of_a.row_tokens + of_b.row_tokens)


@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_value_and_gradient_do_not_depend_on_the_micro_batch(tiny, architecture):
    policy = Policy.load(str(tiny(architecture)))
    seen = []
    for micro_tokens in (1, 24, 10_000):  # rows alone, about three together, all together
        steps = ascend(policy, GradientKeeper(policy), accepted(7), 64, micro_tokens, 1e9, seed=0)
        seen.append((steps[0].objective, GradientKeeper.kept))
    for objective, gradient in seen[1:]:
        assert objective == pytest.approx(seen[0][0], rel=1e-6)
        assert (gradient - seen[0][1]).abs().max() < 1e-6 * seen[0][1].norm()


class GradientKeeper:
    """Stands where the optimizer does and keeps the gradient instead of stepping."""

    kept = None

    def __init__(self, policy):
        self.parameters = list(policy.model.parameters())

    def step(self):
        GradientKeeper.kept = torch.cat([p.grad.flatten() for p in self.parameters])

    def zero_grad(self, set_to_none=True):
        for p in self.parameters:
            p.grad = None


def test_eq_2_is_the_mean_log_likelihood_of_the_sampled_tokens(tiny):
    policy, (tau,) = Policy.load(str(tiny())), accepted(1)
    (step,) = ascend(policy, optimizer_of(policy), [tau], 64, 4096, 1.0, seed=0)
    again = Policy.load(str(tiny()))
    ids = torch.tensor([tau.turns[0].context_ids + tau.turns[0].sampled_ids])
    with torch.no_grad():
        logp = again.model(ids).logits.log_softmax(-1)[0, 4:-1].gather(1, ids[0, 5:, None])
    assert step.objective == pytest.approx(logp.mean().item(), abs=1e-5)
    assert step.tokens == 2


@pytest.mark.parametrize("n,sizes", [(130, [64, 64, 2]), (5, [5]), (2048, [64] * 32)])
def test_every_accepted_trajectory_is_used_once_and_the_short_minibatch_is_kept(tiny, n, sizes):
    policy = Policy.load(str(tiny()))
    steps = ascend(policy, optimizer_of(policy), accepted(n), 64, 4096, 1.0, seed=3)
    assert [step.trajectories for step in steps] == sizes
    assert sum(step.tokens for step in steps) == sum(tau.sampled_tokens for tau in accepted(n))


def test_nothing_accepted_takes_no_step(tiny):
    policy = Policy.load(str(tiny()))
    optimizer = optimizer_of(policy, lr=0.1)
    ascend(policy, optimizer, accepted(3), 64, 4096, 1.0, seed=0)  # momentum that a zero gradient would still apply
    before, count = policy.weights(), [s["step"].item() for s in optimizer.state.values()]
    assert ascend(policy, optimizer, [], 64, 4096, 1.0, seed=0) == []
    empty = Trajectory("t", "test", 0, 0, 1, StopReason.DONE, (Turn((1, 2), (), (), "", "length"),))
    assert ascend(policy, optimizer, [empty], 64, 4096, 1.0, seed=0) == []
    assert all(torch.equal(before[name], weight) for name, weight in policy.weights().items())
    assert [s["step"].item() for s in optimizer.state.values()] == count


def test_one_micro_batch_that_is_not_finite_refuses_the_step(tiny, monkeypatch, tmp_path):
    policy, calls = Policy.load(str(tiny())), []
    optimizer, inner, before = optimizer_of(policy), policy.logprobs, policy.weights()
    monkeypatch.setattr(
        policy, "logprobs", lambda rows: inner(rows) * (math.nan if calls.append(0) or len(calls) == 2 else 1)
    )
    steps = ascend(policy, optimizer, accepted(9), 64, 24, 1.0, seed=0)
    assert len(calls) > 2
    assert [(step.stepped, step.objective, step.gradient_norm) for step in steps] == [(False, None, None)]
    assert all(torch.equal(weight, before[name]) for name, weight in policy.weights().items())
    journal.write_unit(tmp_path / "unit", steps, {})  # in valid JSON, which has no NaN
    assert journal.read_unit(Step, tmp_path / "unit")[0] == steps and "NaN" not in (tmp_path / "unit").read_text()


def test_weights_are_fp32_so_a_step_of_1e_7_moves_them(tiny, tmp_path):
    """A bf16 checkpoint of N(0, 0.02): at least 99% of fp32 weights move; rounded to bf16, almost none would."""
    made = Policy.load(str(tiny()))
    with torch.no_grad():
        for weight in made.trained().values():
            if weight.dim() > 1:  # norms stay 1
                weight.normal_(0, 0.02)
    made.model.to(torch.bfloat16).save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    before = torch.cat([weight.flatten() for weight in policy.weights().values() if weight.dim() > 1])
    ascend(policy, optimizer_of(policy, lr=1e-7), accepted(64, length=40), 64, 4096, 1.0, seed=0)
    after = torch.cat([weight.flatten() for weight in policy.weights().values() if weight.dim() > 1])
    assert before.dtype == after.dtype == torch.float32 and torch.equal(before.bfloat16().float(), before)
    assert (after != before).float().mean() >= 0.99
    assert (after.bfloat16() != before.bfloat16()).float().mean() < 0.005


def test_micro_batches_hold_every_row_within_the_budget():
    rows = [Row(tuple(range(n)), (False,) * n) for n in (5, 3, 9, 2, 7)]
    parts = list(micro_batches(rows, 10))
    assert sorted(len(row.ids) for part in parts for row in part) == [2, 3, 5, 7, 9]
    assert all(len(part) * max(len(row.ids) for row in part) <= 10 for part in parts)
