"""The archive: what is accepted, what is refused, and what a person finds in its folder."""

import json
import math
from pathlib import Path

import pytest

from data_types import Artifact, Candidate, StopReason, Trajectory
from harnesses import check
from metaharness import Archive, artifact, paired

H_0 = (Path(__file__).parent.parent / "harnesses" / "chess_puzzles.py").read_text()


def e_h(right: int, n: int = 256, crashed: int = 0) -> Artifact:
    """n rollouts, the first `right` of them right, the last `crashed` of them crashed."""
    return artifact([
        Trajectory(f"t{i:03d}", "test", 0, 0, int(i < right), StopReason.DONE, ()) if i < n - crashed
        else Trajectory(f"t{i:03d}", "test", 0, 0, 0, StopReason.HARNESS, (), error="ZeroDivisionError")
        for i in range(n)
    ])  # fmt: skip


def candidate(text: str) -> Candidate:
    return Candidate(check.with_prompts(H_0, USER_PROMPT=text), "test", f"says {text}", "000")


def test_crashed_rollouts_count_as_zero_and_stay_in_the_denominator():
    assert e_h(80, crashed=26).score == 80 / 256


def test_standard_error_is_that_of_the_mean_over_tasks():
    assert e_h(64).standard_error == pytest.approx(math.sqrt(0.25 * 0.75 / 255))


def test_a_tie_keeps_the_earlier_entry_and_nan_never_wins(tmp_path):
    archive = Archive(tmp_path)
    archive.add(Candidate(H_0, "incumbent", "h_init", None), e_h(80))
    archive.add(candidate("tie"), e_h(80))
    archive.add(candidate("nan"), Artifact(math.nan, math.nan, e_h(0).trajectories))
    assert (archive.best.id, archive.J_best) == ("000", 80 / 256)
    archive.add(candidate("better"), e_h(81))
    assert (archive.best.id, archive.J_best) == ("003", 81 / 256)


def test_a_harness_whose_every_episode_crashed_is_recorded_and_never_accepted(tmp_path):
    archive = Archive(tmp_path)
    archive.add(Candidate(H_0, "incumbent", "h_init", None), e_h(0, 4))
    entry = archive.add(candidate("broken"), e_h(0, 4, crashed=4))
    assert "ZeroDivisionError" in entry.failure
    assert archive.best.id == "000"


def test_what_needs_no_rollout_is_recorded_with_its_reason(tmp_path):
    archive = Archive(tmp_path)
    archive.add(Candidate(H_0, "incumbent", "h_init", None), e_h(1, 4))
    same = Candidate("# only a comment\n" + H_0, "test", "the same", "000")
    broken = Candidate("def harness(task:\n", "test", "broken", "000")
    cheat = candidate("the answer of 8/8/8/6q1/5k2/6PK/P7/8 is g5g3")
    code = Candidate(H_0.replace("RETRIES = 1", "RETRIES = 2"), "test", "more retries", "000")
    fresh = archive.admit([same, broken, cheat, code, candidate("new"), candidate("new")], "prompts", H_0,
                          ["8/8/8/6q1/5k2/6PK/P7/8"])  # fmt: skip
    assert [c.hypothesis for c in fresh] == ["says new"]
    about = [json.loads((tmp_path / f"00{i}" / "entry.json").read_text()) for i in range(1, 6)]
    assert about[0]["duplicate_of"] == "000" and about[4]["duplicate_of"]
    assert "does not parse" in about[1]["failure"]
    assert "quotes its exam" in about[2]["failure"]
    assert "changes code" in about[3]["failure"]
    assert all(entry["score"] is None for entry in about)
    assert (tmp_path / "004" / "harness.py").read_text() == code.source
    assert "+RETRIES = 2" in (tmp_path / "004" / "diff.patch").read_text()


def test_the_archive_leaves_out_what_comes_from_the_hidden_reference(tmp_path):
    behaviour = {"legal": True, "reference": {"mate": True}}
    scored = artifact([Trajectory("t", "test", 0, 0, 1, StopReason.DONE, (), behaviour=behaviour)])
    Archive(tmp_path).add(Candidate(H_0, "incumbent", "h_init", None), scored)
    assert json.loads((tmp_path / "000/trajectories.jsonl").read_text())["behaviour"] == {"legal": True}
    assert scored.trajectories[0].behaviour == {"legal": True, "reference": {"mate": True}}  # rollouts.jsonl keeps it


def test_comparisons_are_paired_by_task():
    assert paired(e_h(3, 6), e_h(1, 6)) == (2, 0)
    worse_elsewhere = artifact(
        [Trajectory(t.task_id, "test", 0, 0, 1 - t.reward, t.stop, ()) for t in e_h(1, 6).trajectories]
    )
    assert paired(worse_elsewhere, e_h(1, 6)) == (5, 1)
