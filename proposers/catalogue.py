"""The default proposer: a fixed catalogue of edits to the chess harness h_0. Needs no key and no model.

It shows the loop, not discovery: whoever wrote the list knew the domain. Some edits are known to help (legal moves
grouped by origin square and marked, as in Appendix D.3; a more forgiving reading of replies), some do nothing, some do
harm, so that Eq. 3 has something to choose from; the search isn't told which. It reads no traces, and of the scores only
which entry is accepted. Nothing here makes a move: marks and orders come from the notation of the visible legal moves.
"""

import ast
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_types import Candidate
from harnesses.check import literal, problem, prompts, replace_span, tree_hash, with_prompts

NOTICE = "proposer: catalogue, a fixed list of edits, some helpful and some harmful: it shows the loop, not discovery"
EXAMPLES = Path(__file__).parent.parent / "harnesses" / "chess_puzzles_examples.py"
TRIES = 100  # draws for each candidate before the catalogue counts as used up
log = logging.getLogger(__name__)

Change = Callable[[str], str | None]  # source -> edited source, or None where it does not apply


@dataclass(frozen=True)
class Edit:
    name: str
    hypothesis: str
    change: Change
    marks: bool = False  # uses what the SAN of a legal move gives away: + # x

    def __call__(self, source: str) -> str | None:
        """The edited source, a sound harness with another syntax tree; None where the edit does not apply."""
        try:
            edited = self.change(source)
            return edited if edited and not problem(edited) and tree_hash(edited) != tree_hash(source) else None
        except (SyntaxError, ValueError):  # an archive may hold sources that are no harness
            return None


class Catalogue:
    """Propose(A, E; M) of Section 3.2. Seed, label and archive alone decide what is drawn, so a resume draws the same."""

    def __init__(self, seed: int, scope: str = "harness", marks: bool = True):
        """scope "prompts" (FST) draws prompt edits only; marks=False leaves out edits that use the marks of the SAN."""
        if scope not in ("harness", "prompts"):
            raise ValueError(f"expected scope 'harness' or 'prompts', found {scope!r}")
        edits = PROMPT_EDITS if scope == "prompts" else PROMPT_EDITS + CODE_EDITS
        self.seed, self.edits = seed, [edit for edit in edits if marks or not edit.marks]

    def propose(self, archive, M: int, label: str = "") -> list[Candidate]:
        """M candidates whose syntax trees are new to the archive and to each other; fewer if nothing new turns up."""
        rng = random.Random(f"{self.seed} {label} {len(archive.entries)}")  # a str is hashed, the same everywhere
        seen = {_tree(entry.source) for entry in archive.entries}
        drawn = []
        for _ in range(TRIES * M):
            candidate = self._draw(archive, rng)
            if candidate and (tree := tree_hash(candidate.source)) not in seen:
                seen.add(tree)
                drawn.append(candidate)
                if len(drawn) == M:
                    break
        else:
            log.warning("catalogue: %d of %d candidates, nothing new in %d draws", len(drawn), M, TRIES * M)
        return drawn

    def _draw(self, archive, rng: random.Random) -> Candidate | None:
        """One or two edits, mostly of the accepted entry; None if one does not apply."""
        sound = [entry for entry in archive.entries if entry.failure is None]
        parent = archive.best if rng.random() < 0.75 or not sound else rng.choice(sound)
        edits = rng.sample(self.edits, k=1 if rng.random() < 0.7 else 2)
        source = parent.source
        for edit in edits:
            if (source := edit(source)) is None:
                return None
        return Candidate(source, "catalogue", "; ".join(f"{e.name}: {e.hypothesis}" for e in edits), parent.id)


def _tree(source: str) -> str | None:
    try:
        return tree_hash(source)
    except SyntaxError:
        return None


# How code is changed: by name or by an exact piece of text, so that edits compose and what they leave stays readable.


def replace_function(source: str, name: str, new: str) -> str:
    return replace_span(source, _function(source, name), new)


def replace_constant(source: str, name: str, value: str | int) -> str:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return replace_span(source, node.value, literal(value) if isinstance(value, str) else repr(value))
    raise ValueError(f"expected a constant {name}; found none")


def _function(source: str, name: str) -> ast.FunctionDef:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"expected a function {name}; found none")


def function(name: str, new: str) -> Change:
    return lambda source: replace_function(source, name, new)


def constant(name: str, value: str | int) -> Change:
    return lambda source: replace_constant(source, name, value)


def swap(old: str, new: str) -> Change:
    """Put `new` for `old`, which must occur exactly once and not have been swapped before."""
    return lambda source: (
        source.replace(old, new) if source.count(old) == 1 and new not in source.replace(old, "") else None
    )


def first(name: str, statement: str) -> Change:
    """Let the function begin with this statement."""

    def change(source: str) -> str | None:
        node = _function(source, name).body[0]
        begins = ast.get_source_segment(source, node)
        return None if statement in source else replace_span(source, node, f"{statement}\n    {begins}")

    return change


def define(code: str) -> Change:
    """Have this function at the end of the file."""
    return lambda source: source if code in source else f"{source}\n\n{code}"


def steps(*changes: Change) -> Change:
    def change(source: str) -> str | None:
        for one in changes:
            if source is None:
                return None
            source = one(source)
        return source

    return change


def track(source: str) -> str | None:
    """Let `position` be what is on the board throughout the episode: the result of an illegal move doesn't show it."""
    if "position = task" in source:
        return source
    start = swap("    retries = {", "    position = task\n    retries = {")
    return steps(start, swap("if result.accepted:\n", f"if result.accepted:\n{' ' * 16}position = result\n"))(source)
