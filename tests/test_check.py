"""Static checks: what is refused and in which words, what a syntax tree's hash sees, prompts replaced byte for byte."""

import time
from pathlib import Path
from types import SimpleNamespace

import chess
import pytest

from domains.chess_puzzles import Environment
from harnesses import check, chess_puzzles, chess_puzzles_examples
from harnesses.contract import IMPORTS, record

HARNESSES = Path(__file__).parent.parent / "harnesses"
H_0 = (HARNESSES / "chess_puzzles.py").read_text()
EXAMPLES = (HARNESSES / "chess_puzzles_examples.py").read_text()
SMALL = 'SYSTEM_PROMPT = ""\nUSER_PROMPT = "{position}"\n\n\ndef harness(task):\n    yield task\n'


def test_both_shipped_harnesses_pass_and_differ_in_their_prompts_alone():
    assert check.problem(SMALL) is None
    assert check.problem(H_0) is None
    assert check.problem(EXAMPLES, scope="prompts", h_0=H_0) is None
    assert check.prompts(EXAMPLES)["USER_PROMPT"] != check.prompts(H_0)["USER_PROMPT"]


@pytest.mark.parametrize("number, side, san", [(0, "White", "Ng6#"), (1, "Black", "Bxd4#")])
def test_a_worked_example_is_shown_as_h_0_shows_it_and_has_one_mate(number, side, san):
    example = chess_puzzles_examples.USER_PROMPT.split("<|im_end|>\n<|im_start|>user\n")[number]
    shown, answer = example[example.index("FEN:") :].split("<|im_end|>\n<|im_start|>assistant\n")
    fen = shown.splitlines()[0].removeprefix("FEN: ")
    history = shown.split("Moves so far: ")[1].split("\n")[0].split()
    observation = Environment(
        SimpleNamespace(observation={"fen": fen, "history": history}, reference=None)
    ).observation()
    assert shown == chess_puzzles.show(record(observation))
    board = chess.Board(fen)
    mates = [move for move in board.legal_moves if board.san(move).endswith("#")]
    assert board.is_valid() and observation["side"] == side and 4 <= board.legal_moves.count() <= 7
    assert [board.san(move) for move in mates] == [san] and answer == f"<move>{mates[0].uci()}</move>"
    assert chess_puzzles.read_move(answer) == mates[0].uci()


def test_the_hash_sees_code_and_text_but_not_comments_layout_and_docstrings():
    spaced = SMALL.replace("yield task", "yield  (task)  # now") + "\n\n# the end\n"
    described = '"""A harness."""\n' + SMALL.replace("yield", '"""Asks."""\n    yield')
    assert check.tree_hash(SMALL) == check.tree_hash(spaced) == check.tree_hash(described)
    assert check.tree_hash(SMALL) != check.tree_hash(SMALL.replace('= ""', '= "."'))  # a prompt is no docstring
    assert check.tree_hash(SMALL) != check.tree_hash(SMALL.replace("yield task", "yield task, 1"))
    read = "\nSYSTEM = harness.__doc__\n"  # here a docstring is part of what runs
    assert check.tree_hash(SMALL + read) != check.tree_hash(SMALL.replace("yield", '"""Asks."""\n    yield') + read)
    with pytest.raises(SyntaxError):
        check.tree_hash("def")


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("def harness(task):", "def play(task):", "expected one plain function `def harness(task)`"),
        ("def harness(task):", "async def harness(task):", "expected one plain function"),
        ("def harness(task):", "def harness(task, turns=9):", "exactly one argument"),
        ("def harness(task):", "def harness(*task):", "exactly one argument"),
        ("    yield task", "    return task", "must be a generator"),
        ("    yield task", "    return lambda: (yield task)", "must be a generator"),
        ("    yield task\n", "    yield task\n\n\nharness = print\n", "no other use of that name"),
        ("SYSTEM_PROMPT = ", "OTHER = ", "SYSTEM_PROMPT must be one plain string literal"),
        ('"{position}"', 'f"{1}"', "USER_PROMPT must be one plain string literal"),
        ('"{position}"', '"a" + "b"', "USER_PROMPT must be one plain string literal"),
        ('"{position}"\n', '"{position}"\nUSER_PROMPT += "."\n', "USER_PROMPT must be one plain string literal"),
        ("    yield task", "    global USER_PROMPT\n    yield task", "USER_PROMPT must be one plain string literal"),
        (
            "    yield task",
            "    import os.path\n    yield task",
            "imports os.path (line 6); allowed are harnesses.contract",
        ),
        ("    yield task", "    import chess\n    yield task", "imports chess"),
        ("    yield task", "    from harnesses import host\n    yield task", "imports harnesses.host"),
        ("    yield task", "    from . import host\n    yield task", "imports ."),
        ("    yield task", "    yield __import__('os')", "uses __import__ (line 6)"),
        ("    yield task", "    yield open('/etc/passwd')", "uses open"),
        ("    yield task", "    yield harness.__globals__", "uses __globals__"),
        ("    yield task", "    yield task(a=1, a=2)", "does not parse: keyword argument repeated"),
        ("    yield task\n", "    yield task\n\n\nreturn\n", "does not parse: 'return' outside function"),
    ],
)
def test_a_refusal_says_what_to_do(old, new, reason):
    assert old in SMALL
    found = check.problem(SMALL.replace(old, new))
    assert found and reason in found and "\n" not in found


def test_what_string_work_needs_is_allowed():
    imports = "".join(f"import {name}\n" for name in IMPORTS)
    used = "from harnesses import contract\nfrom collections.abc import Iterable\nWORD = re.compile('a')\n"
    assert check.problem(imports + used + SMALL) is None


@pytest.mark.parametrize(
    "nasty",
    ["(" * 5000 + ")" * 5000, "-" * 90_000 + "1", "1" + "+1" * 60_000, "x" + ".a" * 60_000, "f" + "()" * 60_000,
     "lambda:" * 20_000 + "1", "if 1: pass\n" + "elif 1: pass\n" * 12_000, "x = 0x" + "f" * 100_000,
     "x\0", "x = '\ud800'", "#" * 200_001, "#" + "é" * 100_001, "\ufeffx = 1", "\x00" * 10],
    ids=range(14),
)  # fmt: skip
def test_nasty_sources_get_a_reason_and_raise_only_syntax_errors(nasty):
    for scope in ("harness", "prompts"):
        found = check.problem(SMALL + nasty, scope=scope, h_0=SMALL)
        assert found and found.startswith("does not parse") and "\n" not in found
    with pytest.raises(SyntaxError):
        check.tree_hash(SMALL + nasty)


def test_fst_may_change_the_two_texts_and_nothing_else():
    def refused(source):
        return check.problem(source, scope="prompts", h_0=H_0)

    assert refused(check.with_prompts(H_0, SYSTEM_PROMPT="", USER_PROMPT='"{position}"\n\\boxed{}\n"""')) is None
    assert refused(H_0 + "\n# a comment\n") is None
    assert "changes code" in refused(H_0.replace("RETRIES = 1", "RETRIES = 3"))
    assert "changes code" in refused(H_0.replace("Find the next move.", "Next!"))  # a text, but not one of the two
    assert "changes code" in refused(H_0.replace("ASSISTANT_TURNS = 9", "ASSISTANT_TURNS = 9.0"))
    with pytest.raises(ValueError, match="with h_0"):
        check.problem(H_0, scope="prompts")


def test_a_candidate_may_not_quote_its_exam():
    fen, puzzle = "6k1/5ppp/8/8/8/8/3R1PPP/3R2K1", "0008Q"
    quoting = check.with_prompts(H_0, SYSTEM_PROMPT=f"In {fen} play d2d8.")
    assert "quotes its exam" in check.problem(quoting, exam_phrases=[puzzle, fen])
    assert "quotes its exam" in check.problem(f"{H_0}\n# {puzzle}", exam_phrases=[puzzle, fen])
    escaped = quoting.replace("6k1/5ppp", "\\x36k1/" + '5p" "pp')  # the text that runs, however it is written
    assert fen not in escaped and "quotes its exam" in check.problem(escaped, exam_phrases=[fen])
    assert check.problem(quoting, exam_phrases=[puzzle.lower(), ""]) is None


def test_thousands_of_exam_phrases_take_no_time():
    phrases = [f"{number:040d}" for number in range(10_000)]
    began = time.perf_counter()
    assert check.problem(H_0, exam_phrases=phrases) is None
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    "text", ["", "a\nb", 'ends in "', 'a\n"""b"""', "\\d {1,2}\n\\", "\r\n", "\0", "\ud800", "é\u2028\f"]
)
def test_prompts_come_back_as_given_and_the_rest_keeps_its_bytes(text):
    literal = '("{pos"  # é\n  "ition}")'
    for source in (H_0, SMALL.replace("\n", "\r\n"), "é = 'é\f'; " + SMALL.replace('"{position}"', literal)):
        changed = check.with_prompts(source, USER_PROMPT=text)
        assert check.prompts(changed) == check.prompts(source) | {"USER_PROMPT": text}
        before, after = source.split("USER_PROMPT = ")[0], source[source.index("def harness") :]
        assert changed.startswith(before) and changed.endswith(after)
    with pytest.raises(ValueError, match="expected SYSTEM_PROMPT or USER_PROMPT"):
        check.with_prompts(H_0, RETRIES="3")
