"""Nothing is lost: killed at any moment a run ends as if it had never stopped, and every rollout can be traced.

WHALE_KILLS=20 WHALE_SEED=1 pytest -s tests/test_journal.py -k kill      # more kills, at moments known again
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from one_move import save_learner, save_puzzles

import journal
import replay
import whale as whale_module
from data_types import StopReason, Trajectory, Turn
from journal import read_unit
from run_folder import Run

KILLS = int(os.environ.get("WHALE_KILLS", 5))
SEED = int(os.environ.get("WHALE_SEED", time.time()))
SETTINGS = ["prompt_limit=4096", "response_limit=200", "n_weight=20", "n_harness=6", "n_test=6", "B=4", "G=4", "E=0.6",
            "T_min=0.2", "P_w=0.2", "J_min=3", "P_h=1", "eval_steps=2", "harness=", "max_legal=0", "lr=1e-3",
            "test_samples=8", "checkpoint_minutes=0.01"]  # fmt: skip
MEASURED = ("seconds", "row_tokens_per_second", "peak_gib")  # not results


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    model, puzzles = save_learner(folder / "model"), save_puzzles(folder / "puzzles.csv")
    return ["--model", str(model), "--puzzles", str(puzzles)]


def command(*args, settings=()) -> list[str]:
    return [sys.executable, str(ROOT / "whale.py"), *map(str, args), *(x for s in settings for x in ("--set", s))]


def whale(*args, settings=()) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args, settings=settings), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """An adaptive run that nothing stopped -> its folder, how many seconds its loop took."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = whale("--adaptive", "--cycles", 2, *task, "--out", folder, settings=SETTINGS)
    assert done.returncode == 0, done.stderr
    return folder, (folder / "log.jsonl").stat().st_mtime - (folder / "config.json").stat().st_mtime


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of that run, as a kill in its last phase would have left it."""
    folder = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(newest(folder))
    return folder


def newest(run: Path) -> Path:
    """The newest full state."""
    return max((run / "checkpoints").glob("cycle_*"), key=lambda folder: (folder / "state.json").stat().st_mtime_ns)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without_measurements(value):
    if isinstance(value, dict):
        return {k: without_measurements(v) for k, v in value.items() if not k.startswith(MEASURED)}
    return [without_measurements(item) for item in value] if isinstance(value, list) else value


def lines(path: Path) -> list:
    return [without_measurements(json.loads(line)) for line in path.read_text().splitlines()]


def files(folder: Path, pattern: str) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob(pattern))}


def assert_same(run: Path, whole: Path) -> None:
    assert lines(run / "log.jsonl") == lines(whole / "log.jsonl")
    for kind in ("rollouts", "updates", "proposals", "archive"):
        mine, theirs = files(run / kind, "*.jsonl"), files(whole / kind, "*.jsonl")
        assert mine.keys() == theirs.keys()
        assert all(lines(path) == lines(theirs[name]) for name, path in mine.items())
    for pattern in ("harness.py", "entry.json", "diff.patch"):
        mine, theirs = files(run / "archive", pattern), files(whole / "archive", pattern)
        assert {name: sha256(path) for name, path in mine.items()} == {n: sha256(path) for n, path in theirs.items()}
    for name in (newest(whole).name, "best_on_test", "training_selected", "stagewise_best"):
        mine, theirs = (folder / "checkpoints" / name / "model.safetensors" for folder in (run, whole))
        assert mine.exists() == theirs.exists(), name  # theta_0 needs no copy
        assert not mine.exists() or sha256(mine) == sha256(theirs), name


def units(run: Path) -> int:
    return sum(len(list((run / kind).rglob("*.jsonl"))) for kind in ("rollouts", "updates", "proposals"))


def test_killed_anywhere_it_ends_as_if_it_had_never_stopped(task, whole, tmp_path):
    """Each kill comes a random time after a random number of units is there; a resume may be lent fewer threads."""
    whole, seconds = whole
    run, rng, total = tmp_path / "run", random.Random(SEED), units(whole)
    begin = command("--adaptive", "--cycles", 2, *task, "--out", run, settings=SETTINGS)
    for kill, place in enumerate(sorted(rng.uniform(0, total) for _ in range(KILLS)), start=1):
        if run.exists() and not (run / "config.json").exists():
            shutil.rmtree(run)  # killed before there was a run
        resumes = (run / "config.json").exists()
        threads = {"OMP_NUM_THREADS": str(rng.choice([1, 2]))} if resumes else {}
        process = subprocess.Popen(command("--resume", run) if resumes else begin, stdout=subprocess.DEVNULL,
                                   env={**os.environ, **threads})  # fmt: skip
        while units(run) < int(place):
            assert process.poll() is None, f"ended before {place} of {total} units"
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 2 * seconds / total))
        process.send_signal(signal.SIGKILL)
        process.wait()
        half = [path.name for path in run.rglob("*.half")] if run.exists() else []
        print(f"seed {SEED}, kill {kill} at {place:.1f} of {total} units: {units(run)} there, half-written: {half}")
    done = whale("--resume", run)
    assert done.returncode == 0, done.stderr
    assert "equal to the bit" not in done.stderr
    assert_same(run, whole)


def test_steps_are_done_again_from_the_start_where_no_full_state_is_left(whole, copied):
    """A cut weights file counts as no checkpoint; the stored rollouts and theta_0 give the rest, to the bit."""
    for folder in (copied / "checkpoints").iterdir():
        if folder.name != "start":
            (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    before = {path: path.stat().st_mtime_ns for path in (copied / "rollouts").rglob("*.jsonl")}
    done = whale("--resume", copied)
    assert done.returncode == 0, done.stderr
    assert "not whole" in done.stderr and "equal to the bit" not in done.stderr
    assert_same(copied, whole[0])
    assert before == {path: path.stat().st_mtime_ns for path in (copied / "rollouts").rglob("*.jsonl")}


def test_stagewise_comes_back_to_its_best_weights_after_a_kill(task, tmp_path, monkeypatch, capsys):
    """Stopped where the best weights are restored and measured, but not yet saved as the phase's end."""
    changes = ["--set", "E_total=1", "--set", "I_total=1", "--set", "checkpoint_minutes=0", "--set", "lr=3e-3"]
    args = ["--method", "stagewise", *task, *(x for s in SETTINGS for x in ("--set", s)), *changes]
    assert whale_module.main([*args, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish_phase", lambda *_: signal.raise_signal(signal.SIGINT))
        assert whale_module.main([*args, "--out", str(tmp_path / "run")]) == 130
    assert whale_module.main(["--resume", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", tmp_path / "whole")
    steps = [event for event in lines(tmp_path / "whole" / "log.jsonl") if event["event"] == "weight_step"]
    best = max(steps, key=lambda step: step["r_bar"])["s"]
    _, about = read_unit(Trajectory, tmp_path / "whole" / "rollouts" / "cycle_01_harness" / "search_00.jsonl")
    assert about["weights"] == best < len(steps)


def test_two_full_states_are_kept(whole):
    kept = {path.name for path in (whole[0] / "checkpoints").iterdir()}
    assert len([name for name in kept if name.startswith("cycle_")]) == 2
    assert kept >= {"start", "best_on_test", "training_selected"} and not list(whole[0].rglob("*.half"))


def test_half_written_things_are_dropped_and_what_is_not_ours_stays(whole, copied):
    (copied / "rollouts" / "test_000.jsonl.half").write_text('{"task_id": "cut')
    (copied / "checkpoints" / "cycle_01_weight.half").mkdir()
    (copied / "checkpoints" / "cycle_01_weight.half" / "model.safetensors").write_bytes(b"cut")
    (copied / "archive" / "cycle_notes.txt").write_text("a stray file")
    shutil.rmtree(copied / "harnesses")
    with open(copied / "log.jsonl", "a") as log:
        log.write('{"event": "weight_st')
    done = whale("--resume", copied)
    assert done.returncode == 0, done.stderr
    assert_same(copied, whole[0])
    assert not list(copied.rglob("*.half")) and (copied / "archive" / "cycle_notes.txt").exists()


def test_a_second_run_on_the_folder_is_refused(copied, task, capsys):
    held = journal.lock(copied)
    for args in (["--resume", copied], ["--out", copied, *task, "--set", "max_legal=0"]):
        assert whale_module.main(list(map(str, args))) == 2
        error = f"whale.py: expected a run folder that nobody uses, found {copied} in use by another process\n"
        assert capsys.readouterr().err.endswith(error)
    held.close()
    assert whale_module.main(["--resume", str(copied)]) == 0


def rewrite(path: Path, change) -> None:
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))


def everywhere(run: Path, change) -> None:
    """As an older version would have written it."""
    for path in (run / "config.json", *run.glob("checkpoints/*/state.json")):
        rewrite(
            path, lambda stored: change(stored.get("began", stored)) if {"began", "format"} & stored.keys() else None
        )


def in_newest(run: Path, change) -> None:
    rewrite(newest(run) / "state.json", change)


CHANGES = {
    "lr is 0.001, not 0.01": ["--set", "lr=0.01"],
    "seed is 0, not 3; G is 4, not 2": ["--seed", "3", "--set", "G=2"],
    "lr was 0.001, is 0.002": lambda run: rewrite(run / "config.json", lambda c: c["config"].update(lr=0.002)),
    "B was 4, is '4'": lambda run: rewrite(run / "config.json", lambda c: c["config"].update(B="4")),
    "threads was": lambda run: rewrite(run / "config.json", lambda c: c.update(threads=c["threads"] + 1)),
    "expected B of type int": lambda run: everywhere(run, lambda c: c["config"].update(B="4")),
    "settings differ in W": lambda run: everywhere(run, lambda c: c["config"].pop("W")),
    "expected config of type dict": lambda run: rewrite(run / "config.json", lambda c: c.pop("config")),
    "expected an object": lambda run: (run / "config.json").write_text("[]"),
    "found it damaged": lambda run: (run / "config.json").write_text('{"config'),
    "of format 2, found an older one": lambda run: rewrite(run / "config.json", lambda c: c.pop("format")),
    "expected state of type dict": lambda run: in_newest(run, lambda s: s.pop("state")),
    "expected train of type int": lambda run: in_newest(run, lambda s: s["state"]["rollouts"].pop("train")),
    "expected drawn of type int": lambda run: in_newest(run, lambda s: s["state"].update(drawn="8")),
    "found no h_0.py": lambda run: (run / "h_0.py").unlink(),
    "h_0.py edited": lambda run: (run / "h_0.py").write_text("# another\n"),
    "bytes in": lambda run: (run / "log.jsonl").write_text(""),
    "expected a full state": lambda run: shutil.rmtree(run / "checkpoints"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_changed_is_named_in_one_line(copied, message, capsys):
    change = CHANGES[message]
    if callable(change):
        change(copied)
    code = whale_module.main(["--resume", str(copied), *(() if callable(change) else change)])
    error = capsys.readouterr().err.splitlines()
    assert code == 2 and len(error) == 1 and message in error[0], error


def test_other_puzzles_are_refused(task, tmp_path, copied):
    config = json.loads((copied / "config.json").read_text())
    puzzles = Path(config["config"]["puzzles"])
    text = puzzles.read_text()
    try:
        puzzles.write_text("".join(text.splitlines(keepends=True)[:-1]))
        done = whale("--resume", copied)
    finally:
        puzzles.write_text(text)
    assert done.returncode == 2
    assert "expected the puzzles that the run began with, found others in" in done.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of three megabytes; the tiny model's full state needs one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(task, whole, small_disk):
    run = small_disk / "run"
    full = whale("--adaptive", "--cycles", 2, *task, "--out", run, settings=SETTINGS)
    assert full.returncode == 1 and len(full.stderr.splitlines()) == 1, full.stderr
    assert "No space left on device" in full.stderr and f"--resume {run}" in full.stderr
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    read_only = whale("--resume", run)
    assert read_only.returncode == 2 and len(read_only.stderr.splitlines()) == 1, read_only.stderr
    assert "Read-only file system" in read_only.stderr
    subprocess.run(["mount", "-o", "remount,rw,size=64m", str(small_disk)], check=True)
    done = whale("--resume", run)
    assert done.returncode == 0, done.stderr
    assert_same(run, whole[0])


def test_a_folder_that_becomes_read_only_stops_the_run_in_one_line(task, small_disk):
    run = small_disk / "run"
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    process = subprocess.Popen(command("--adaptive", *task, "--out", run, settings=SETTINGS), stderr=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, text=True)  # fmt: skip
    while not list((run / "rollouts").glob("*.jsonl")) and process.poll() is None:
        time.sleep(0.01)
    while subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
        assert process.poll() is None  # busy while a file is open for writing
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and len(error.splitlines()) == 1, error
    assert "Read-only file system" in error and f"--resume {run}" in error


def test_a_trajectory_comes_back_from_its_unit_as_it_was(tmp_path):
    turn = Turn((1, 2), (3,), (-0.1,), "a\u2028b", "stop", "context")
    behaviour = {"legal": True, "moves": ["e2e4"], "of": {"illegal": 0}}
    tau = Trajectory("t", "test", 1, 2**63 - 1, 1, StopReason.DONE, (turn, turn), 3, behaviour, "why", 0.1 + 0.2, "h")
    journal.write_unit(tmp_path / "unit", [tau, tau], {"seconds": 1.0})
    (again, _), about = read_unit(Trajectory, tmp_path / "unit")
    assert again == tau and type(again.stop) is StopReason and hash(again.turns) == hash(tau.turns)
    assert about == {"records": 2, "seconds": 1.0}


def test_a_hundred_stored_trajectories_come_again_from_their_seeds(whole, capsys):
    run, replayed, turns = whole[0], 0, 0
    for path in sorted((run / "rollouts").rglob("*.jsonl")):
        stored, about = read_unit(Trajectory, path)
        if replay.weights_of(run, about["weights"])[0]:
            assert replay.main([str(run), str(path.relative_to(run / "rollouts"))]) == 0, capsys.readouterr().out
            replayed, turns = replayed + len(stored), turns + sum(len(tau.turns) > 1 for tau in stored)
    print(f"{replayed} trajectories, {turns} of them with more than one turn")
    assert replayed >= 100 and turns


def test_replay_shows_one_trajectory_token_by_token(whole, capsys):
    assert replay.main([str(whole[0]), "cycle_00_weight/step_0001.jsonl:3"]) == 0
    said = capsys.readouterr().out
    (tau,) = read_unit(Trajectory, whole[0] / "rollouts" / "cycle_00_weight" / "step_0001.jsonl")[0][2:3]
    assert "the same ids" in said and f"R = {tau.reward}" in said and "<|im_start|>assistant\n>>>" in said
    table = [line.split() for line in said.splitlines() if line.startswith("     ")]
    ids = [token for turn in tau.turns for token in turn.sampled_ids]
    sampled = [logprob for turn in tau.turns for logprob in turn.logprobs]
    assert [int(line[1]) for line in table] == ids
    for line, logprob in zip(table, sampled, strict=True):
        assert float(line[2]) == pytest.approx(logprob, abs=1e-6)
        assert float(line[3]) == pytest.approx(logprob, abs=1e-4)


def test_replay_says_when_the_weights_are_gone_and_shows_ids_alone(whole, capsys):
    assert replay.main([str(whole[0]), "cycle_00_weight/step_0002.jsonl:1"]) == 0
    said = capsys.readouterr().out
    assert "no longer kept" in said and "the same contexts" in said and "mask 1:" in said


def test_replay_fails_if_an_id_differs(copied, capsys):
    unit = copied / "rollouts" / "cycle_00_weight" / "step_0001.jsonl"
    stored = unit.read_text().splitlines()
    first = json.loads(stored[0])
    first["turns"][0]["sampled_ids"][0] += 1
    unit.write_text("\n".join([json.dumps(first), *stored[1:]]) + "\n")
    assert replay.main([str(copied), "cycle_00_weight/step_0001.jsonl:1"]) == 1
    assert "OTHER IDS" in capsys.readouterr().out
    assert replay.main([str(copied), "cycle_00_weight/step_0001.jsonl:99"]) == 2
    assert replay.main([str(copied), "cycle_00_weight/step_0099.jsonl"]) == 2
