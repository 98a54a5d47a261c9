"""Files that are there whole or not at all, so that a kill at any moment costs the one thing that was being made.

A unit is a list of records that were paid for together: the rollouts of a step, the figures of an update, a proposer's
candidates. Its file has one JSON line for each record and a last line about the unit; that it exists means that it is
finished. What is being written has a name ending in `.half` and gets its own name last.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from data_types import StopReason, Trajectory, Turn

HALF = ".half"


def write(path: Path, *texts: str) -> None:
    """Replace a file at once; it is on the disk, not in a cache, when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + HALF)
    with half.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(texts)
    settle(half, path)


def settle(half: Path, whole: Path) -> None:
    """Give a written file or folder its own name, once all of it is on the disk."""
    for path in (*half.glob("*"), half):
        sync(path)
    if whole.is_dir():
        shutil.rmtree(whole)  # a folder can't be replaced by one with something in it
    os.replace(half, whole)
    sync(whole.parent)
    sync(whole.parent.parent)  # which may be new too


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_half_written(folder: Path) -> None:
    for half in list(folder.rglob(f"*{HALF}")):
        shutil.rmtree(half) if half.is_dir() else half.unlink(missing_ok=True)


def write_unit(path: Path, records: Sequence, about: dict) -> None:
    write(path, *map(line_of, records), json.dumps({"records": len(records), **about}, allow_nan=False) + "\n")


def line_of(record) -> str:
    return json.dumps(vars(record), default=vars, allow_nan=False) + "\n"


def read_unit(kind: type, path: Path) -> tuple[list, dict]:
    """-> records of this kind, equal to those that were written; the line about them."""
    with path.open(encoding="utf-8") as file:
        *lines, about = map(json.loads, file)
    return [trajectory(line) if kind is Trajectory else kind(**line) for line in lines], about


def trajectory(line: dict) -> Trajectory:
    """A trajectory from its JSON."""
    turns = [{key: tuple(x) if isinstance(x, list) else x for key, x in turn.items()} for turn in line["turns"]]
    return Trajectory(**{**line, "stop": StopReason(line["stop"]), "turns": tuple(Turn(**turn) for turn in turns)})


def lock(folder: Path):
    """Hold this folder for as long as the returned file is open, or the process lives. ValueError if another does."""
    file = open(os.open(folder / "lock", os.O_RDONLY | os.O_CREAT, 0o644))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"expected a run folder that nobody uses, found {folder} in use by another process") from None
    return file
