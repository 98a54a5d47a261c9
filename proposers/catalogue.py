"""The default proposer: a fixed catalogue of edits to the chess harness h_0. Needs no key and no model.

It shows the loop, not discovery: whoever wrote the list knew the domain. Some edits are known to help (legal moves
grouped by origin square and marked, as in Appendix D.3; a reply read more forgivingly), some do nothing, some do harm, so
that Eq. 3 has something to choose from. Which is which is not told to the search. It reads no traces and no scores beyond
asking the archive which entry is accepted.
"""

import ast
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from textwrap import dedent

from data_types import Candidate
from harnesses.check import literal, problem, prompts, replace_span, tree_hash, with_prompts

EXAMPLES = Path(__file__).parent.parent / "harnesses" / "chess_puzzles_examples.py"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Edit:
    """`change` maps a source to the edited one, or to None where the edit does not apply to it."""

    name: str
    hypothesis: str
    change: Callable[[str], str | None]
    marks: bool = False  # uses what the notation of a legal move gives away: + # x

    def __call__(self, source: str) -> str | None:
        try:
            edited = self.change(source)
        except (SyntaxError, ValueError):  # an archive may hold sources that are no harness
            return None
        changed = edited is not None and problem(edited) is None and tree_hash(edited) != tree_hash(source)
        return edited if changed else None


class Catalogue:
    """Propose(A, E; M) of Section 3.2. The same seed, label and archive give the same candidates, so a resume does too."""

    def __init__(self, seed: int, scope: str = "harness", marks: bool = True):
        """scope "prompts" (FST) draws prompt edits only; marks=False leaves out edits that use the marks of the SAN."""
        if scope not in ("harness", "prompts"):
            raise ValueError(f"expected scope 'harness' or 'prompts', found {scope!r}")
        edits = PROMPT_EDITS if scope == "prompts" else PROMPT_EDITS + CODE_EDITS
        self.seed, self.edits = seed, [edit for edit in edits if marks or not edit.marks]

    def propose(self, archive, M: int, label: str = "") -> list[Candidate]:
        """M candidates whose syntax trees are new to the archive and to each other; fewer once nothing new is left."""
        rng = random.Random(f"{self.seed} {label} {len(archive.entries)}")  # a str is hashed, the same way everywhere
        seen = {hash_ for entry in archive.entries if (hash_ := _hash_or_none(entry.source))}
        drawn = []
        for candidate in self._draws(archive, rng):
            if len(drawn) == M:
                break
            if (hash_ := tree_hash(candidate.source)) not in seen:
                seen.add(hash_)
                drawn.append(candidate)
        if len(drawn) < M:
            log.warning("catalogue: nothing new left to propose, %d of %d candidates", len(drawn), M)
        return drawn
