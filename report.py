"""What a person sees of a run: lines while it goes on, and tables and pictures from its folder alone."""

import json
import math
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

import metaharness
import rsft
from data_types import Artifact, StopReason, Trajectory

CHOICES = {
    "best_on_test": "best on D_test",
    "last": "last pair",
    "training_selected": "chosen by training signals",
}


@contextmanager
def progress(total: int, what: str):
    """A bar with a rate on a terminal -> a function to call as each rollout ends."""
    with tqdm(total=total, desc=what, unit="rollout", disable=None, leave=False) as bar:
        yield lambda trajectory: bar.update()


def episode(policy, tau: Trajectory) -> None:
    """One whole episode, the tokens that the model sampled between >>> and <<<."""
    print(f"--- one episode: task {tau.task_id}, R = {tau.reward}, ended by {tau.stop} ---")
    for row in rsft.training_sequences(tau):
        print(marked(policy, row))
    print("--- end of the episode ---", flush=True)


def marked(policy, row) -> str:
    """The text of a row, the tokens that the model sampled between >>> and <<<."""
    text, start = "", 0
    for end in range(1, len(row.ids) + 1):
        if end == len(row.ids) or row.mask[end] != row.mask[start]:
            piece = policy.tokenizer.decode(row.ids[start:end], skip_special_tokens=False)
            text += f">>>{piece}<<<" if row.mask[start] else piece
            start = end
    return text


def weight_step(run, k: int, trajectories: Sequence[Trajectory], steps: Sequence[rsft.Step], r_bar, sampled, updated):
    """Log and print one rollout step of the weight phase. sampled, updated: the lines about its two units."""
    sampling, training = sampled["seconds"], updated["seconds"]
    n = len(trajectories)
    accepted = sum(tau.reward for tau in trajectories)
    figures = {
        "k": k,
        "s": run.state.s,
        "rollouts": n,
        "accepted": accepted,
        "accepted_cut_off": sum(tau.reward and tau.turns[-1].finish == "length" for tau in trajectories),
        "reward": accepted / n,
        "r_bar": r_bar,
        "optimizer_steps": sum(step.stepped for step in steps),
        "refused_steps": sum(not step.stepped for step in steps),
        "objective": steps[0].objective if steps else None,
        "gradient_norm": steps[0].gradient_norm if steps else None,
        "trained_tokens": sum(step.tokens for step in steps),
        "sampled_tokens": sum(tau.sampled_tokens for tau in trajectories),
        "seconds_sampling": sampling,
        "seconds_training": training,
        "row_tokens_per_second": sum(step.row_tokens for step in steps) / training if steps else None,
        "micro_tokens": steps[-1].micro_tokens if steps else None,
        "activation_checkpointing": steps[-1].checkpointing if steps else None,
        "peak_gib": max(sampled["peak_gib"], updated["peak_gib"]),
        **{f"ended_{stop}": sum(tau.stop == stop for tau in trajectories) for stop in StopReason},
    }
    run.log("weight_step", **figures)
    objective = "nothing accepted, no step"
    if steps:
        objective = f"J {steps[0].objective:.3f}" if steps[0].stepped else "refused: gradient not finite"
    rate = f" at {figures['row_tokens_per_second']:,.0f} row tokens/s" if steps else ""
    trained = f"trained in {training:.1f} s{rate}"
    print(
        f"cycle {k} step {run.state.s}: reward {accepted}/{n} = {accepted / n:.3f}, window {r_bar:.3f}, "
        f"{figures['optimizer_steps']} optimizer steps, {objective}, {figures['sampled_tokens'] / n:.0f} tokens each, "
        f"{n / sampling:.1f} rollouts/s, {trained}, peak {figures['peak_gib']:.1f} GiB",
        flush=True,
    )


def search_iteration(run, k: int, j: int, archive, added: int) -> None:
    """Log and print the entries that one iteration added to the archive."""
    for entry in archive.entries[len(archive.entries) - added :]:
        won, lost = entry.against_incumbent or (None, None)
        figures = {
            "k": k,
            "j": j,
            "id": entry.id,
            "parent": entry.parent,
            "hypothesis": entry.hypothesis,
            "score": entry.score,
            "standard_error": entry.standard_error,
            "failure": entry.failure,
            "duplicate_of": entry.duplicate_of,
            "won": won,
            "lost": lost,
            "accepted": archive.best is entry,
        }
        run.log("candidate", **figures)
        if entry.score is None:
            result = f"not run: {entry.failure or f'the same syntax tree as {entry.duplicate_of}'}"
        else:
            result = f"score {entry.score:.3f} (standard error {entry.standard_error:.3f})"
            result += f", tasks won {won}, lost {lost}" if won is not None else ""
        mark = " <- accepted" if archive.best is entry else ""
        print(f"cycle {k} search {j} harness {entry.id} ({entry.hypothesis}): {result}{mark}", flush=True)


def pair(run, phase: str, e_h: Artifact, signal: float | None, harness: str) -> None:
    """Log and print one measured pair (theta, h). The interval is clustered by task: rollouts of a task are not
    independent."""
    state = run.state
    half = 1.96 * e_h.standard_error or 3 / len(e_h.outcomes)  # all alike: the rule of three
    figures = {
        "look": len(state.pairs),
        "phase": phase,
        "s": state.s,
        "searched": state.searched,
        "rollouts": state.spent,
        "test_rollouts": state.rollouts["test"],
        "mean": e_h.score,
        "low": max(0.0, e_h.score - half),
        "high": min(1.0, e_h.score + half),
        "tasks": len(e_h.outcomes),
        "samples": len(e_h.trajectories) // len(e_h.outcomes),
        "signal": signal,
        "harness": harness,
    }
    state.pairs.append(figures)
    run.log("pair", **figures)
    print(f"test after {phase}: {describe(figures)}", flush=True)


def describe(pair: dict) -> str:
    return (
        f"mean@{pair['samples']} {100 * pair['mean']:.1f}%, 95% [{100 * pair['low']:.1f}, {100 * pair['high']:.1f}], "
        f"on {pair['tasks']} tasks, after {pair['rollouts']} training and search rollouts, harness {pair['harness']}"
    )


def choose(pairs: Sequence[dict], choice: str) -> dict:
    """The pair that each rule returns; the earlier one of equals."""
    match choice:
        case "best_on_test":
            return max(pairs, key=lambda pair: pair["mean"])
        case "training_selected":
            return max(pairs, key=lambda pair: -math.inf if pair["signal"] is None else pair["signal"])
        case "last":
            return pairs[-1]
    raise ValueError(choice)


def final(run) -> None:
    """The table of all pairs, the three choices, the picture, the diff from h_0, and where all of it lies."""
    pairs, folder = run.state.pairs, run.folder
    print("\nall measured pairs (theta, h); the interval is 95%, clustered by task")
    for measured in pairs:
        where = f"  {measured['phase']:>12}  step {measured['s']:>4}  search {measured['searched']:>3}  "
        print(where + describe(measured))
    chosen = {choice: choose(pairs, choice) for choice in CHOICES}
    for choice, words in CHOICES.items():
        looks = f" of {len(pairs)} looks" if choice == "best_on_test" else ""
        print(f"{words}{looks}: after {chosen[choice]['phase']}, {describe(chosen[choice])}")
    spent = {name: getattr(run.state, name) for name in ("rollouts", "tokens", "seconds")}
    for name, values in spent.items():
        print(f"{name}: {', '.join(f'{what} {value:,.0f}' for what, value in values.items())}")
    run.log("final", looks=len(pairs), spent=run.state.spent, **spent, **chosen)
    change = metaharness.diff((folder / "h_0.py").read_text(), run.state.h, "h_0", "accepted")
    (folder / "accepted.patch").write_text(change)
    print(f"\nfrom h_0 to the accepted harness:\n{change or '(no change)'}")
    print(f"learning curve: {learning_curve(folder)}")
    print(f"run folder: {folder} (config.json, log.jsonl, rollouts/, archive/, harnesses/, checkpoints/)", flush=True)


def learning_curve(folder: Path) -> Path:
    """Test accuracy against training plus search rollouts, as a PNG drawn from log.jsonl."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    pairs = [event for event in events if event["event"] == "pair"]
    x, y = [pair["rollouts"] for pair in pairs], [100 * pair["mean"] for pair in pairs]
    bars = [
        [100 * (pair["mean"] - pair["low"]) for pair in pairs],
        [100 * (pair["high"] - pair["mean"]) for pair in pairs],
    ]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.errorbar(x, y, yerr=bars, marker="o", capsize=3, color="tab:blue")
    for pair in pairs:
        axes.annotate(
            pair["phase"], (pair["rollouts"], 100 * pair["mean"]), textcoords="offset points", xytext=(5, 5), size=7
        )
    axes.margins(x=0.15)  # room for the labels
    axes.set(xlabel="training and search rollouts", ylabel=f"test mean@{pairs[0]['samples']} (%)", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(folder / "learning_curve.png", dpi=120)
    pyplot.close(figure)
    return folder / "learning_curve.png"


if __name__ == "__main__":
    print(learning_curve(Path(sys.argv[1])))
