"""whale() against a literal transcription of Algorithms 1 and 2, with rewards and scores from a script."""

import json
import math
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

import whale as whale_module
from config import Config
from data_types import Candidate, StopReason, Task, Trajectory, Turn
from harnesses import check
from run_folder import Run
from whale import Fixed, Patience, Sampler, schedule, steps_of, whale

H_0 = (Path(__file__).parent.parent / "harnesses" / "chess_puzzles.py").read_text()
N, B, G, M = 20, 4, 2, 3
E, I, CYCLES, W, T_MIN, P_W, J_MIN, P_H = Fraction("0.5"), 2, 3, 2, 1, 1, 3, 1  # noqa: E741 (steps: E N / B = 2.5 -> 3)


def config(**changes) -> Config:
    epochs = {name: Fraction(steps * B, N) for name, steps in (("W", W), ("T_min", T_MIN), ("P_w", P_W))}
    totals = {"E_total": Fraction("0.8"), "I_total": 3, "n_harness": 8, "eval_steps": 0}
    sizes = {"cycles": CYCLES, "E": E, "I": I, "M": M, "B": B, "G": G, "J_min": J_MIN, "P_h": P_H}
    return Config(**{"domain": "chess", **sizes, **totals, **epochs, **changes})


class Script:
    """Rewards by rollout step and scores by (cycle, place in the cycle's archive): the same for both sides."""

    def __init__(self, seed: int):
        self.seed = seed

    def reward(self, s: int) -> int:
        return random.Random(f"{self.seed} w {s}").randrange(B * G + 1)

    def score(self, k: int, i: int) -> float:
        return random.Random(f"{self.seed} h {k} {i}").randrange(6) / 8  # ties happen


def algorithm_1(script, cycles, steps, iterations, h="h_0"):
    """Algorithm 1, line by line -> events. A harness is known by its name."""
    events, s = [], 0
    for k in range(cycles):  # 1
        for _ in range(steps):  # 3
            events += [("collect", s, h), ("ascend", s)]  # 4-6
            s += 1
        if iterations is None:
            continue
        archive = [(script.score(k, 0), h)]  # 8
        events.append(("evaluate", k, (h,)))
        for j in range(iterations):  # 9
            C = [f"{k}.{j + 1}.{m}" for m in range(M)]  # 10
            events += [("propose", k, j + 1), ("evaluate", k, tuple(C))]  # 11
            archive += [(script.score(k, len(archive) + m), name) for m, name in enumerate(C)]  # 12
            h_accept = max(archive, key=lambda entry: entry[0])[1]  # 13
        h = h_accept if iterations else h  # 15
    return events, h


def algorithm_2(script, cycles, h="h_0"):
    """Algorithm 2, line by line -> events."""
    events, s = [], 0
    for k in range(cycles):  # 1
        t, r_best, t_best, rewards = 0, -math.inf, 0, []  # 2
        while True:  # 3
            t += 1  # 4
            events += [("collect", s, h), ("ascend", s)]  # 5-6
            rewards.append(script.reward(s) / (B * G))
            s += 1
            r_bar = sum(rewards[-W:]) / len(rewards[-W:])  # 7
            if r_bar > r_best:  # 8
                r_best, t_best = r_bar, t  # 9
            if t > T_MIN and t - t_best >= P_W:  # 11
                break
        archive = [(script.score(k, 0), h)]  # 12
        events.append(("evaluate", k, (h,)))
        j, j_best, J_best = 1, 1, archive[0][0]  # 13
        while True:  # 14
            j += 1  # 15
            C = [f"{k}.{j - 1}.{m}" for m in range(M)]
            events += [("propose", k, j - 1), ("evaluate", k, tuple(C))]  # 16
            new = [(script.score(k, len(archive) + m), name) for m, name in enumerate(C)]
            archive += new  # 17
            if max(new)[0] > J_best:  # 18
                J_best, j_best = max(new)[0], j  # 19
            if j >= J_MIN and j - j_best >= P_H:  # 21
                break
        h = max(archive, key=lambda entry: entry[0])[1]  # 22
    return events, h


def named(source: str) -> str:
    return check.prompts(source)["USER_PROMPT"].removeprefix("harness ") if source != H_0 else "h_0"


def play(monkeypatch, tmp_path, cfg: Config, script: Script):
    """The real loop, archive, checks and run folder; collect, ascend, evaluate and proposer come from the script."""
    events, weights = [], []
    said = (Turn((1,), (2,), (0.0,), "", "stop"),)
    tau = lambda reward, task="t": Trajectory(task, "test", 0, 0, reward, StopReason.DONE, said)  # noqa: E731

    def collect(policy, host, domain, h, B_s, G, limits, seed, phase, s, progress):
        assert len(B_s) == B
        events.append(("collect", s, named(h)))
        won = script.reward(s)
        return [tau(int(i < won)) for i in range(B * G)]

    def ascend(policy, optimizer, S_plus, *rest):
        events.append(("ascend", len([e for e in events if e[0] == "ascend"])))
        policy.theta += 1
        return []

    def evaluate(policy, host, domain, sources, D_harness, limits, seed, phase, k, progress):
        before = sum(len(e[2]) for e in events if e[0] == "evaluate" and e[1] == k)
        events.append(("evaluate", k, tuple(map(named, sources))))
        scores = [script.score(k, before + i) for i in range(len(sources))]
        return [tau(int(i < s * 8), f"t{i}") for s in scores for i in range(8)]

    class Proposer:
        def propose(self, archive, M, label):
            k, j = map(int, label.split("."))
            events.append(("propose", k, j))
            texts = [f"harness {k}.{j}.{m}" for m in range(M)]
            return [Candidate(check.with_prompts(H_0, USER_PROMPT=t), "script", t, archive.best.id) for t in texts]

    class Theta:
        theta = 0

        def save(self, folder):
            folder.mkdir(parents=True)
            (folder / "theta").write_text(str(self.theta))

        def restore(self, folder):
            self.theta = int((folder / "theta").read_text())
            weights.append(self.theta)

        def plan(self):
            return {}

    monkeypatch.setattr(whale_module.rsft, "collect", collect)
    monkeypatch.setattr(whale_module.rsft, "ascend", ascend)
    monkeypatch.setattr(whale_module.metaharness, "evaluate", evaluate)
    monkeypatch.setattr(whale_module.report, "final", lambda run: None)

    def measure(cfg, run, policy, domain, D_test, host, limits, phase, signal):
        run.state.pairs.append({"phase": phase, "signal": signal})

    monkeypatch.setattr(whale_module, "measure_pair", measure)
    tasks = [Task(f"t{i}", "test", {}, None) for i in range(N)]
    data = SimpleNamespace(weight=tasks, harness=tasks[:8], test=tasks[:4])
    run = Run.create(tmp_path / "run", {}, H_0)
    optimizer = SimpleNamespace(state_dict=dict)
    whale(cfg, run, Theta(), optimizer, SimpleNamespace(exam_phrases=lambda task: []), data, None, Proposer())
    return events, run.state, weights


SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", ["whale", "fst"])
def test_fixed_budgets_are_algorithm_1(monkeypatch, tmp_path, method, seed):
    events, state, _ = play(monkeypatch, tmp_path, config(method=method), Script(seed))
    expected, h = algorithm_1(Script(seed), CYCLES, 3, I)
    assert events == expected
    assert named(state.h) == h
    assert state.rollouts == {
        "train": CYCLES * 3 * B * G,
        "search": CYCLES * I * M * 8,
        "incumbent": CYCLES * 8,
        "test": 0,
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_patience_is_algorithm_2(monkeypatch, tmp_path, seed):
    events, state, _ = play(monkeypatch, tmp_path, config(adaptive=True), Script(seed))
    cycles = len({k for kind, k, *_ in events if kind == "evaluate"})
    expected, _ = algorithm_2(Script(seed), CYCLES)
    assert events == expected[: len(events)]  # no phase begins once the fixed total is spent
    assert named(state.h) == algorithm_2(Script(seed), cycles)[1]
    assert events == expected or state.spent >= CYCLES * (3 * B * G + I * M * 8)


def test_weight_only_and_harness_only_skip_the_other_phase(monkeypatch, tmp_path):
    events, *_ = play(monkeypatch, tmp_path / "w", config(method="weight-only"), Script(1))
    assert events == algorithm_1(Script(1), 1, 4, None)[0]  # E_total N / B = 0.8 x 20 / 4
    events, *_ = play(monkeypatch, tmp_path / "h", config(method="harness-only"), Script(1))
    assert events == algorithm_1(Script(1), 1, 0, 3)[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_stagewise_restores_the_weights_of_the_best_windowed_reward(monkeypatch, tmp_path, seed):
    script = Script(seed)
    events, _, restored = play(monkeypatch, tmp_path, config(method="stagewise"), script)
    assert [e[0] for e in events] == ["collect", "ascend"] * 4 + ["evaluate"] + ["propose", "evaluate"] * 3
    r_bar = [sum(map(script.reward, range(max(0, t - 1), t + 1))) / min(t + 1, W) for t in range(4)]
    assert restored == [1 + r_bar.index(max(r_bar))]  # theta counts the steps; the earlier of equals


def test_patience_by_hand():
    stop = Patience(3, 2)
    assert [stop(x) for x in (0.1, 0.2, 0.2, 0.2, 0.3)] == [False, False, False, True, False]
    assert [Patience(1, 1)(math.nan)] == [True]  # NaN sets no best
    assert [Fixed(2)(0.0), Fixed(1)(0.0)] == [False, True]


def test_spans_of_the_paper_are_exact():
    """0.6 epoch is 45, 42, 39 steps and 0.2 epoch 15, 14, 13 for the paper's three training sets."""
    sizes = (18_946, 17_917, 16_384)
    assert [steps_of(Fraction("0.6"), n, 256) for n in sizes] == [45, 42, 39]
    assert [steps_of(Fraction("0.2"), n, 256) for n in sizes] == [15, 14, 13]
    assert steps_of(Fraction("0.01"), 10, 4) == 1
    weight, harness = next(iter(schedule(Config("chess", adaptive=True), 16_384)))
    assert (weight.minimum, weight.patience, harness.minimum, harness.patience) == (14, 13, 6, 2)


def test_the_sampler_is_one_stream_without_repeats_inside_an_epoch():
    tasks = list(range(10))
    sampler = Sampler(tasks, seed=5)
    drawn = [sampler.next(6) for _ in range(5)]
    flat = [task for batch in drawn for task in batch]
    assert sorted(flat) == sorted(tasks * 3)
    assert all(sorted(flat[i : i + 10]) == tasks for i in (0, 10, 20))
    assert flat[:10] != flat[10:20]
    again = Sampler(tasks, seed=5, drawn=18)
    assert [again.next(6), again.next(6)] == drawn[3:]


def test_five_spans_of_0_6_epochs_see_each_of_ten_examples_three_times():
    sampler, n = Sampler(list(range(10)), seed=1), steps_of(Fraction("0.6"), 10, 1)
    spans = [[sampler.next(1)[0] for _ in range(n)] for _ in range(5)]
    flat = [example for span in spans for example in span]
    assert all(flat.count(example) == 3 for example in range(10))
    assert flat == Sampler(list(range(10)), seed=1).next(30)  # a span begins where the one before ended
    for epochs, cycles, examples in (("0.6", 9, 54), ("0.2", 8, 16)):  # floats lose one of them
        assert cycles * steps_of(Fraction(epochs), 10, 1) == examples


def test_a_step_that_accepts_nothing_is_logged_and_the_sampler_goes_on(monkeypatch, tmp_path):
    script = Script(0)
    script.reward = lambda s: 0
    _, state, _ = play(monkeypatch, tmp_path, config(method="weight-only"), script)
    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [step["accepted"] for step in steps] == [0] * 4 and state.drawn == 4 * B
    assert all(step["optimizer_steps"] == 0 and step["objective"] is None for step in steps)
