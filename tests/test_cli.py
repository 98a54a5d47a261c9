"""The true command line, on a tiny real model, real puzzles and real harness processes."""

import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from config import Config, validate
from whale import main

ROOT = Path(__file__).parent.parent
SMALL = ["prompt_limit=4096", "response_limit=48", "n_weight=24", "n_harness=4", "n_test=4", "B=4", "G=2", "I=1",
         "harness=", "lr=1e-3"]  # fmt: skip


def command(*args, settings=SMALL):
    return [sys.executable, str(ROOT / "whale.py"), *map(str, args), *(x for s in settings for x in ("--set", s))]


def whale(*args, settings=SMALL) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args, settings=settings), capture_output=True, text=True, timeout=300)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_adaptive_whale_end_to_end(tiny, tmp_path):
    run = tmp_path / "run"
    done = whale("--domain", "chess", "--adaptive", "--model", tiny(), "--out", run)
    assert done.returncode == 0, done.stderr
    log = lines(run / "log.jsonl")
    events = [event["event"] for event in log]
    assert events[0] == "pair" and events[-1] == "final"
    assert events.count("weight_step") >= 2 and events.count("candidate") >= 1 + 2 * 3
    rollouts = [line for unit in (run / "rollouts").rglob("*.jsonl") for line in lines(unit)[:-1]]
    final = log[-1]
    assert len(rollouts) == sum(final["rollouts"].values())
    assert final["spent"] == final["rollouts"]["train"] + final["rollouts"]["search"]
    for tau in rollouts:
        for turn in tau["turns"]:
            assert len(turn["sampled_ids"]) == len(turn["logprobs"]) > 0
    sources = sorted((run / "archive").glob("*/*/harness.py"))
    assert len(sources) == events.count("candidate")
    assert (run / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    AutoModelForCausalLM.from_pretrained(next((run / "checkpoints").glob("cycle_*")))
    assert "sandbox:" in done.stdout and ">>>" in done.stdout and "catalogue" in done.stdout
    for pair in (event for event in log if event["event"] == "pair"):
        assert f"{100 * pair['mean']:.1f}%" in done.stdout


@pytest.mark.parametrize("method", ["weight-only", "harness-only", "stagewise", "fst"])
def test_every_method_runs(tiny, tmp_path, method):
    done = whale(
        "--method", method, "--model", tiny(), "--out", tmp_path / "run", settings=[*SMALL, "E_total=0.3", "I_total=1"]
    )
    assert done.returncode == 0, done.stderr
    log = lines(tmp_path / "run" / "log.jsonl")
    assert ("weight_step" in {e["event"] for e in log}) == (method != "harness-only")
    assert ("candidate" in {e["event"] for e in log}) == (method != "weight-only")


def test_ctrl_c_stops_cleanly(tiny, tmp_path):
    process = subprocess.Popen(command("--model", tiny(), "--out", tmp_path / "run"), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    while not (tmp_path / "run" / "log.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in error and "Traceback" not in error


def test_dry_run_loads_no_model(tmp_path):
    done = whale("--preset", "paper", "--dry-run", "--model", "no/such-model", settings=[])
    assert done.returncode == 0
    assert "cycle 5" in done.stdout


BAD = [
    (["--domain", "go"], [], "--domain: expected one of chess, found 'go'"),
    (["--method", "sft"], [], "--method: expected one of whale"),
    (["--proposer", "oracle"], [], "--proposer: expected one of catalogue, found 'oracle'"),
    (["--preset", "huge"], [], "--preset: expected one of"),
    (["--puzzles", "missing.csv"], [], "missing.csv"),
    ([], ["bogus=1"], "--set: expected key=value with a key of marks, themes, moves, max_legal"),  # those it takes
    ([], ["adaptive=true"], "--set adaptive: it has a flag of its own, use --adaptive"),
    ([], ["model=x"], "--set model: it has a flag of its own, use --model"),
    ([], ["lr"], "--set: expected key=value"),
    ([], ["lr=fast"], "--set lr: expected a value of type float, found 'fast'"),
    ([], ["G=0"], "--set G: expected a number above 0, found 0"),
    ([], ["E=1/0"], "--set E: expected"),
    ([], ["top_p=1.5"], "--set top_p: expected"),
    ([], ["sampler=vllm"], "--set sampler: expected"),
    ([], ["themes=nonsense"], "puzzle"),
    ([], ["harness=README.md"], "--set harness"),
    (["--resume", "no-run"], [], "expected a run folder, found no config.json in no-run"),
]


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"response_limit": 1_048_577}, "--set response_limit: expected a number of at most 1048576, found 1048577"),
        ({"n_test": 1_000_001}, "--set n_test: expected a number of at most 1000000, found 1000001"),
        ({"W": Fraction(10**30)}, f"--set W: expected a number of at most 1000000, found {10**30}"),
        ({"lr": 1.5}, "--set lr: expected a number of at most 1, found 1.5"),
        ({"seed": 2**63}, "--seed: expected a number of at most 9223372036854775807, found 9223372036854775808"),
        ({"cycles": 0}, "--cycles: expected a number above 0, found 0"),
        ({"B": 100_000, "G": 101}, "--set B, --set G: expected B * G of at most 10000000, found 10100000"),
        ({"temperature": 1e-320}, "--set temperature: expected 0 or a number of at least 0.001, found 1e-320"),
    ],
)
def test_numbers_have_bounds(settings, message):
    validate(Config("chess", prompt_limit=1 << 20, B=10**6, G=10, lr=1.0, seed=2**63 - 1, temperature=0.0))
    with pytest.raises(ValueError) as raised:
        validate(Config("chess", **settings))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "args,settings,message", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, capsys, args, settings, message):
    monkeypatch.chdir(tmp_path)
    assert main(command(*args, settings=settings)[2:]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and message in error
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path):
    done = subprocess.run(command("--model", "no/such-folder"), capture_output=True, text=True, timeout=100,
                          cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "--model: expected" in done.stderr and not (tmp_path / "runs").exists()


def test_a_bad_row_is_named_by_its_id(tmp_path):
    header = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags\n"
    row = "{},r6k/pp2r2p/4Rp1Q/3p4/8/1N1P2R1/PqP2bPP/7K b - - 0 24,f2g3 e6e8,1848,75,95,7,mate,,\n"
    (tmp_path / "bad.csv").write_text(header + "".join(row.format(f"row{i:02d}") for i in range(40)))
    done = whale("--puzzles", tmp_path / "bad.csv", settings=["max_legal=0"])
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "row" in done.stderr and "e6e8" in done.stderr
