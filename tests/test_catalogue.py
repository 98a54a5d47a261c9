"""The catalogue: every edit gives a harness that runs, edits compose, draws depend on seed and archive alone."""

import random
from pathlib import Path
from types import SimpleNamespace

import chess
import pytest

from harnesses import check
from harnesses.contract import Act, Ask, Reply, record
from proposers.catalogue import CODE_EDITS, PROMPT_EDITS, Catalogue

HARNESSES = Path(__file__).parent.parent / "harnesses"
SOURCES = {name: (HARNESSES / f"{name}.py").read_text() for name in ("chess_puzzles", "chess_puzzles_examples")}
EDITS = PROMPT_EDITS + CODE_EDITS


def seen(fen: str, history: list[str]) -> dict:
    board = chess.Board(fen)
    legal = sorted(board.legal_moves, key=lambda move: move.uci())
    return {"fen": fen, "side": "White" if board.turn else "Black", "board": str(board), "history": history,
            "legal": [{"uci": move.uci(), "san": board.san(move)} for move in legal]}  # fmt: skip


FIRST = seen("6k1/5ppp/8/8/8/8/3R1PPP/3R2K1 w - - 0 2", ["a7a6"])
SECOND = {
    "accepted": True,
    "status": "accepted",
    "reply": "h7h6",
    **seen("6k1/5pp1/7p/8/8/8/3R1PPP/3R2K1 w - - 0 3", ["a7a6"]),
}
REFUSED = {"accepted": False, "status": "illegal"}
REPLIES = [
    "Hm, I see no move.",
    "<move>d2d9</move> <move>a1a8</move>",
    "Best is <move>d2d3</move>",
    "<move>d2d8</move>",
]


def play(source: str) -> tuple[list[str], list]:
    """Drive a harness by hand: prose, an illegal move, an accepted one, another -> the actions, the last messages."""
    namespace = {}
    exec(compile(source, "harness", "exec"), namespace)
    episode, actions, value, turn, messages = namespace["harness"](record(FIRST)), [], None, 0, []
    results = iter([REFUSED, SECOND, SECOND, SECOND])
    try:
        while turn < len(REPLIES) + 1:
            request = episode.send(value)
            if isinstance(request, Ask):
                messages = request.messages
                value, turn = Reply(turn, REPLIES[turn % len(REPLIES)], "stop"), turn + 1
            else:
                assert isinstance(request, Act)
                actions.append(request.action)
                value = record(next(results))
    except StopIteration:
        pass
    return actions, messages


def archive(*sources: str):
    entries = [SimpleNamespace(id=f"{i:03d}", source=s, score=0.1, failure=None) for i, s in enumerate(sources)]
    return SimpleNamespace(entries=entries, best=entries[0])


def test_there_are_at_least_24_edits_and_as_many_on_the_prompts_as_on_the_code():
    assert len(EDITS) >= 24 and len(PROMPT_EDITS) == len(CODE_EDITS)
    assert len({edit.name for edit in EDITS}) == len(EDITS)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_every_edit_gives_a_harness_that_runs(name, edit):
    edited = edit(SOURCES[name])
    if edited is None:
        assert f"{edit.name}: {name}" in {"worked examples: chess_puzzles_examples", "one example less: chess_puzzles",
                                          "turned round: chess_puzzles_examples"}  # fmt: skip
        return
    assert check.problem(edited) is None
    only_prompts = check.problem(edited, scope="prompts", h_0=SOURCES[name]) is None
    assert only_prompts == (edit in PROMPT_EDITS)
    _, messages = play(edited)
    assert messages


def test_pairs_of_edits_compose():
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    pairs = [(one, two) for one in EDITS for two in EDITS if one is not two]
    for one, two in random.Random(seed).sample(pairs, 150):
        edited = one(SOURCES["chess_puzzles_examples"])
        edited = edited and two(edited)
        if edited:
            assert check.problem(edited) is None, (one.name, two.name)
            play(edited)


def edited(*names: str) -> str:
    source = SOURCES["chess_puzzles"]
    for name in names:
        source = next(edit for edit in EDITS if edit.name == name)(source)
    return source


def shown(*names: str) -> str:
    namespace = {}
    exec(compile(edited(*names), "harness", "exec"), namespace)
    return namespace["show_legal"](record([
        {"uci": "d2d8", "san": "Rd8#"}, {"uci": "d2d3", "san": "Rd3"}, {"uci": "e1e8", "san": "Rxe8+"}]))  # fmt: skip


def test_lists_by_hand():
    assert shown("marked") == "d2d8 (mate), d2d3, e1e8 (check) (capture)"
    assert shown("forcing moves first") == "d2d8 e1e8 d2d3"
    assert shown("only forcing moves") == "d2d8"
    assert shown("grouped") == "\nd2: d2d8 d2d3\ne1: e1e8"
    assert shown("half the list") == "d2d8 d2d3"
    assert shown("checks and captures") == "d2d8 e1e8"
    assert shown("mates apart") == "d2d8 d2d3 e1e8\nOf these, checkmate: d2d8"
    assert shown("forcing moves first", "marked") == "d2d8 (mate), e1e8 (check) (capture), d2d3"
    assert shown("marked", "forcing moves first") == "d2d8 (mate), e1e8 (check) (capture), d2d3"


def test_limits_of_a_turn_compose():
    both = edited("at most 24 tokens a turn", "stop at the tag")
    assert 'Ask(messages, stop=("</move>",), max_tokens=24)' in both
    assert next(edit for edit in EDITS if edit.name == "stop at the tag")(both) is None


def test_readers_by_hand():
    def read(name, text):
        edit = next(edit for edit in EDITS if edit.name == name)
        namespace = {}
        exec(compile(edit(SOURCES["chess_puzzles"]), "harness", "exec"), namespace)
        return namespace["read_move"](text)

    assert read("read the last move", "e2e4 or rather D2D4.") == "d2d4"
    assert read("read the first move", "e2e4 or rather d2d4") == "e2e4"
    assert read("read the tag only", "e2e4") is None
    assert read("read after thinking", "<think>e2e4 d2d4</think> <move>g1f3</move>") == "g1f3"


def test_the_same_seed_and_archive_draw_the_same_and_nothing_known():
    known = archive(SOURCES["chess_puzzles_examples"])
    draws = [
        [c.source for c in Catalogue(seed).propose(known, 3, label)]
        for seed, label in ((1, "0.1"), (1, "0.1"), (2, "0.1"), (1, "0.2"))
    ]
    assert draws[0] == draws[1] and draws[0] != draws[2] and draws[0] != draws[3]
    trees = [check.tree_hash(source) for source in draws[0]]
    assert len(set(trees)) == 3 and check.tree_hash(known.entries[0].source) not in trees


def test_scope_and_marks_are_kept():
    h_0 = SOURCES["chess_puzzles_examples"]
    for label in map(str, range(10)):
        for candidate in Catalogue(0, scope="prompts").propose(archive(h_0), 3, label):
            assert check.problem(candidate.source, scope="prompts", h_0=h_0) is None
        for candidate in Catalogue(0, marks=False).propose(archive(h_0), 3, label):
            assert ".san" not in candidate.source
