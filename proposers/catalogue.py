"""The default proposer: a fixed catalogue of edits to the chess harness h_0. Needs no key and no model.

It shows the loop, not discovery: whoever wrote the list knew the domain. Some edits are known to help (legal moves
grouped by origin square and marked, as in Appendix D.3; a more forgiving reading of replies), some do nothing, some do
harm, so that Eq. 3 has something to choose from; the search isn't told which. It reads no traces, and of the scores
only which entry is accepted. Nothing here makes a move: marks and orders come from the notation of the visible moves.
"""

import ast
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

from data_types import Candidate
from harnesses.check import literal, problem, prompts, replace_span, tree_hash, with_prompts

NOTICE = "proposer: catalogue, a fixed list of edits, some helpful and some harmful: it shows the loop, not discovery"
EXAMPLES = Path(__file__).parent.parent / "harnesses" / "chess_puzzles_examples.py"
TURN = "<|im_end|>\n<|im_start|>user\n"  # between worked examples
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
    """Propose(A, E; M) of Section 3.2. Seed, label and archive alone decide what is drawn: a resume draws the same."""

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


def prompt(name: str, change: Callable[[str], str]) -> Change:
    return lambda source: with_prompts(source, **{name: change(prompts(source)[name])})


def system_says(text: str) -> Change:
    return prompt("SYSTEM_PROMPT", lambda old: text)


def user_hears(line: str) -> Change:
    """One more line before the position, so that what the small models imitate stays last."""
    return prompt("USER_PROMPT", lambda old: old if line in old else f"{line}\n{old}")


def user_without(text: str, instead: str = "") -> Change:
    return prompt("USER_PROMPT", lambda old: old.replace(text, instead))


def turned(old: str) -> str:
    """The position at the other end of the prompt; worked examples must stay before it."""
    rest = old.replace("{position}", "").strip()
    if TURN in old:
        return old
    return f"{{position}}\n\n{rest}" if old.endswith("{position}") else f"{rest}\n\n{{position}}"


def with_examples(old: str) -> str:
    return old if TURN in old else prompts(EXAMPLES.read_text())["USER_PROMPT"]


def one_example(old: str) -> str:
    """Without the last worked example: all between the last two questions."""
    *kept, last, question = old.split(TURN) if TURN in old else ("", "")
    return TURN.join([*kept, question]) if kept else old


PROMPT_EDITS = [
    Edit("terse", "fewer words leave less to imitate", system_says("One legal move in <move></move>, nothing else.")),
    Edit("role", "a role may call up chess knowledge", system_says("You are a chess grandmaster who solves puzzles.")),
    Edit("no system prompt", "the user prompt says it all", system_says("")),
    Edit("list is complete", "moves outside the list are refused", user_hears("Only the listed moves are legal.")),
    Edit("mate first", "many puzzles end in mate", user_hears("First look for a move that gives checkmate.")),
    Edit("forcing first", "solutions are forcing", user_hears("Prefer checks, then captures, then threats.")),
    Edit("form", "says what UCI is", user_hears("UCI is the from-square, then the to-square, as in g1f3.")),
    Edit("step by step", "reasoning may help", user_hears("Think step by step about every move before you answer.")),
    Edit("rules", "the rules may help", user_hears(
        "Pawns move forward and capture sideways. Knights jump. Bishops move on diagonals, rooks on lines, queens on "
        "both. A king in check must leave it. Checkmate ends the game. Castling moves the king two squares.")),
    Edit("copy", "copying is what it can do", user_hears("Copy one move from the list of legal moves.")),
    Edit("no prose", "prose is not a move", user_hears("Do not explain. Do not repeat the position.")),
    Edit("one line", "short answers end early", user_hears("Answer in one line.")),
    Edit("verify", "a check of its own may help", user_hears("Check that your move is in the list.")),
    Edit("material", "winning material is common", user_hears("Look for a move that wins a piece.")),
    Edit("king", "the king is the target", user_hears("Attack the king of the other side.")),
    Edit("safety", "blunders lose", user_hears("Do not leave a piece where it can be taken.")),
    Edit("side", "it may move for the wrong side", user_hears("Move only pieces of the side to move.")),
    Edit("promotion", "promotions have a fifth letter", user_hears("A promotion ends in q, r, b or n, as in a7a8q.")),
    Edit("only move", "puzzles have one solution", user_hears("Exactly one move is right.")),
    Edit("no escape", "says what mate is", user_hears("In checkmate the attacked king has no legal move.")),
    Edit("squares", "says what squares are", user_hears("Files are a to h and ranks are 1 to 8.")),
    Edit("list first", "the answer is in the list", user_hears("Read the list of legal moves before you choose.")),
    Edit("urgent", "emphasis may help", user_hears("This is very important.")),
    Edit("long form", "more talk, more chances", user_hears("Explain your plan in a paragraph, then give the move.")),
    Edit("polite system", "a usual system prompt", system_says("You are a helpful assistant who plays chess.")),
    Edit("tag in system", "the form in the first line", system_says("Reply: <move>one legal UCI move</move>")),
    Edit("no sample move", "the sample move may be copied", user_without(", as in <move>e2e4</move>")),
    Edit("no goal", "the goal is plain from the list", user_without("Find the best move. ")),
    Edit("turned round", "what stands last is freshest", prompt("USER_PROMPT", turned)),
    Edit("worked examples", "small models imitate", prompt("USER_PROMPT", with_examples)),
    Edit("one example less", "a shorter prompt", prompt("USER_PROMPT", one_example)),
]  # fmt: skip

MARKS = dedent("""
    def marks(san):
        names = [("#", "mate"), ("+", "check"), ("x", "capture")]
        return "".join(f" ({name})" for sign, name in names if sign in san)
    """).lstrip()


def listed(body: str, *helpers: str) -> Change:
    """Another way to show the legal moves; which of them are shown, and in what order, stays."""

    def change(source: str) -> str:
        old = ast.get_source_segment(source, _function(source, "show_legal")).splitlines()
        kept = [line for line in old if line.startswith("    legal = ")]
        return replace_function(source, "show_legal", "\n".join(["def show_legal(legal):", *kept, *new]))

    new = indent(dedent(body).strip(), "    ").splitlines()
    return steps(change, *map(define, helpers))


def picked(moves: str) -> Change:
    """Which legal moves are shown, and in what order, however they are shown."""
    return first("show_legal", f"legal = {moves}")


FORCING_FIRST = 'sorted(legal, key=lambda m: ("#" not in m.san, "+" not in m.san, "x" not in m.san))'


def without_line(start: str) -> Change:
    """Leave out one line of the position."""

    def change(source: str) -> str | None:
        text = ast.get_source_segment(source, _function(source, "show"))
        kept = [line for line in text.splitlines() if not line.strip().startswith(start)]
        return replace_function(source, "show", "\n".join(kept))

    return change


def reads(body: str) -> Change:
    """Another way to read the move of a reply."""
    new = "def read_move(text):\n" + "".join(f"    {line}\n" for line in dedent(body).strip("\n").splitlines())
    return function("read_move", new.rstrip())


MOVE = r'r"(?<!\w)[a-h][1-8][a-h][1-8][a-z]?(?![\w=])"'

CODE_EDITS = [
    Edit("grouped", "legal moves by the square they start from", listed("""
        groups = {}
        for move in legal:
            groups.setdefault(move.uci[:2], []).append(move.uci)
        return "\\n".join(["", *(f"{square}: {' '.join(moves)}" for square, moves in groups.items())])
        """)),
    Edit("marked", "says which moves mate, check or capture", listed("""
        return ", ".join(move.uci + marks(move.san) for move in legal)
        """, MARKS), marks=True),
    Edit("grouped and marked", "as in Appendix D.3", listed("""
        groups = {}
        for move in legal:
            groups.setdefault(move.uci[:2], []).append(move.uci + marks(move.san))
        return "\\n".join(["", *(f"{square}: {', '.join(moves)}" for square, moves in groups.items())])
        """, MARKS), marks=True),
    Edit("forcing moves first", "the solution is mostly forcing", picked(FORCING_FIRST), marks=True),
    Edit("only forcing moves", "a shorter list is easier to choose from", picked(
        '[m for m in legal if "#" in m.san] or [m for m in legal if "+" in m.san] or legal'), marks=True),
    Edit("checks and captures", "quiet moves seldom solve puzzles", picked(
        '[m for m in legal if set(m.san) & set("+#x")] or legal'), marks=True),
    Edit("shortlist", "five moves are enough to choose from", picked(f"{FORCING_FIRST}[:5]"), marks=True),
    Edit("mates apart", "a mate is never missed on a line of its own", listed("""
        mates = " ".join(move.uci for move in legal if "#" in move.san)
        return f"{' '.join(move.uci for move in legal)}\\nOf these, checkmate: {mates or 'none'}"
        """), marks=True),
    Edit("SAN too", "models have read games in SAN", listed("""
        return " ".join(f"{move.uci}={move.san}" for move in legal)
        """), marks=True),
    Edit("one a line", "moves apart are easier to copy", listed("""
        return "\\n".join(["", *(move.uci for move in legal)])
        """)),
    Edit("bracketed list", "each move in the form of the answer", listed("""
        return " ".join(f"<move>{move.uci}</move>" for move in legal)
        """)),
    Edit("reversed list", "the last moves are read best", picked("legal[::-1]")),
    Edit("half the list", "a shorter list", picked("legal[: len(legal) // 2 + 1]")),
    Edit("no list", "the board says it all", listed("""
        return "not shown"
        """)),
    Edit("no FEN", "the board shows the same", without_line('f"FEN:')),
    Edit("no board", "the FEN shows the same", steps(without_line("position.board"), without_line('f"Board'))),
    Edit("no history", "the position is enough", without_line('f"Moves so far')),
    Edit("last move only", "old moves are noise", swap("{' '.join(position.history)}", "{position.history[-1]}")),
    Edit("read the last move", "a reply that weighs several moves settles on its last", reads(f"""
        found = re.findall({MOVE}, text.lower())
        return found[-1] if found else None
        """)),
    Edit("read the first move", "what follows the first move is chatter", reads(f"""
        found = re.findall({MOVE}, text.lower())
        return found[0] if found else None
        """)),
    Edit("read the tag only", "moves outside the tag are not answers", reads(f"""
        tagged = re.findall(r"<move>(.*?)</move>", text, re.DOTALL)
        found = re.findall({MOVE}, tagged[-1].lower()) if tagged else []
        return found[0] if len(found) == 1 else None
        """)),
    Edit("read after thinking", "moves inside <think> are scratch notes", first(
        "read_move", 'text = text.rpartition("</think>")[2]')),
    Edit("three retries", "more chances", constant("RETRIES", 3)),
    Edit("no retries", "saves tokens", constant("RETRIES", 0)),
    Edit("one turn", "saves tokens", constant("ASSISTANT_TURNS", 1)),
    Edit("short feedback", "less to read", steps(
        constant("MALFORMED", "One legal move, please."), constant("ILLEGAL", "{move} is illegal. Another, please."))),
    Edit("at most 24 tokens a turn", "cuts chatter off", swap(
        "yield Ask(messages", "yield Ask(messages, max_tokens=24")),
    Edit("stop at the tag", "nothing after the move matters", swap(
        "yield Ask(messages", 'yield Ask(messages, stop=("</move>",)')),
    Edit("short next position", "the board is known", function("after_accepted", dedent("""
        def after_accepted(result):
            return f"Correct. The opponent replies {result.reply}. Legal moves: {show_legal(result.legal)}"
        """).strip())),
    Edit("restate the line", "the moves so far need not be carried in mind", function("after_accepted", dedent("""
        def after_accepted(result):
            line = " ".join(result.history[1:])
            return f"Your line so far: {line}. The opponent's last reply: {result.reply}.\\n\\n{show(result)}"
        """).strip())),
    Edit("every position afresh", "a clean prompt for each move", swap(
        "messages.append(tool(after_accepted(result)))",
        "messages = [system(SYSTEM_PROMPT), user(fill(USER_PROMPT, position=show(result)))]")),
]  # fmt: skip
