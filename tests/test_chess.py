"""Chess Puzzles: the rules of the verifier, of the environment and of the data, on positions made for one rule each."""

import csv
import random
from pathlib import Path

import chess
import pytest
import zstandard

from data_types import StopReason, Task
from domains.chess_puzzles import BUILT_IN, RETRY_LIMIT, Environment, exam_phrases, load
from domains.make_chess_puzzles import FEW, forces_mate, mates_in_one
from harnesses import chess_puzzles as h_0
from harnesses.contract import Act, Ask, Reply, record

HEADER = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags"
TWO_MATES = "7k/p5pp/8/8/8/8/8/K2RR3 b - - 0 1", "a7a6 e1e8"  # d1d8 mates as well
TWO_MOVES = "r2r2k1/p4ppp/8/8/8/8/3R1PPP/3R2K1 b - - 0 1", "a7a6 d2d8 a8d8 d1d8"
SHARED = Path(__file__).parents[2] / "shared/data/chess/lichess_puzzles.csv"


def row(number: int, fen: str, moves: str, rating="1500", themes="mate") -> str:
    return f"id{number:04},{fen},{moves},{rating},80,90,100,{themes},,"


def file_of(folder: Path, *rows: str, name="puzzles.csv") -> str:
    (folder / name).write_text("\n".join([HEADER, *rows]) + "\n")
    return str(folder / name)


def many(count: int, fen=TWO_MOVES[0], moves=TWO_MOVES[1], **columns) -> list[str]:
    """Up to 12 rows of different positions: one more white pawn somewhere out of the way."""
    rows = []
    free = [square for square in range(chess.A3, chess.A6) if chess.square_file(square) in (1, 2, 5, 6)]
    for number, square in enumerate(free[:count]):
        board = chess.Board(fen)
        board.set_piece_at(square, chess.Piece(chess.PAWN, chess.WHITE))
        rows.append(row(number, board.fen(), moves, **columns))
    return rows


def loaded(tmp_path: Path, fen: str, moves: str) -> Task:
    """The task that the loader makes of one row; three more rows let the splits be filled."""
    splits = load(file_of(tmp_path, row(9999, fen, moves), *many(9)), sizes=(20, 1, 1))
    return next(t for t in (*splits.weight, *splits.harness, *splits.test) if t.id == "id9999")


def position(fen: str, *reference: str) -> Task:
    return Task("a task", "test", {"fen": fen, "history": []}, {"moves": list(reference), "themes": [], "rating": None})


def play(task: Task, *replies: str, harness=h_0.harness) -> tuple[Environment, list]:
    """One episode of a harness with these replies of a model -> the environment at its end and all results."""
    environment, results, written = Environment(task), [], list(replies)
    generator = harness(record(environment.observation()))
    request = next(generator)
    try:
        while True:
            if isinstance(request, Ask):
                if environment.on_ask() or not written:
                    return environment, results
                text = written.pop(0)
                environment.on_reply(text)
                request = generator.send(Reply(len(replies) - len(written) - 1, text, "stop"))
            else:
                results.append(environment.act(request.action, request.options))
                if environment.ended:
                    return environment, results
                request = generator.send(record(results[-1]))
    except StopIteration:
        return environment, results


def test_first_listed_move_is_the_opponents(tmp_path):
    task = loaded(tmp_path, *TWO_MATES)
    seen = Environment(task).observation()
    assert (seen["fen"], seen["side"]) == ("7k/6pp/p7/8/8/8/8/K2RR3 w - - 0 2", "White")
    assert seen["history"] == ["a7a6"] and {"uci": "e1e8", "san": "Re8#"} in seen["legal"]
    assert seen["legal"] == sorted(seen["legal"], key=lambda move: move["uci"])
    assert task.reference["moves"] == ["e1e8"] and "mate" not in str(seen)
    assert loaded(tmp_path, *TWO_MOVES).reference["moves"] == ["d2d8", "a8d8", "d1d8"]


def test_a_mate_other_than_the_reference_is_wrong_and_counted_apart(tmp_path):
    environment, results = play(loaded(tmp_path, *TWO_MATES), "<move>d1d8</move>", "<move>e1e8</move>")
    assert environment.ended == StopReason.ENVIRONMENT and results == [{"accepted": False, "status": "wrong"}]
    assert environment.reward("e1e8") == 0 and environment.behaviour()["mate_not_reference"]


@pytest.mark.parametrize(
    "replies, reward, solved",
    [
        (["d2d8", "d1d8"], 1, 2),
        (["d2d8"], 0, 1),  # cut off by the turn limit
        (["d2d8", "nothing to add", "still nothing"], 0, 1),
        (["d2d7", "d2d8", "d1d8"], 0, 0),  # legal but wrong: no retry
        (["d1d8", "d2d8", "d1d8"], 1, 2),  # illegal, one retry
        (["d1d8", "d1d8", "d2d8", "d1d8"], 0, 0),
        (["hm", "d1d8", "d2d8", "d1d8"], 1, 2),  # one retry of each kind
    ],
)
def test_only_the_complete_sequence_counts(tmp_path, replies, reward, solved):
    environment, results = play(loaded(tmp_path, *TWO_MOVES), *replies)
    assert environment.reward(replies[-1]) == reward
    assert environment.behaviour()["solved_moves"] == solved
    assert environment.behaviour()["reference"] == {"solver_moves": 2, "mate": True}
    assert [r["reply"] for r in results if "reply" in r] == ["a8d8"] * (solved > 0)
    assert all(r["history"] == ["a7a6", "d2d8", "a8d8"] for r in results if "reply" in r)


@pytest.mark.parametrize(
    "reply, status",
    [
        ("e7e8q", "solved"),
        ("e7e8Q", "solved"),
        ("E7E8Q", "solved"),
        ("e7e8", "illegal"),  # never made a queen for the model
        ("e7e8k", "illegal"),
        ("e7e8p", "illegal"),
        ("e7e8=Q", None),
        ("e8=Q", None),
        ("e7e8n", "wrong"),
    ],
)
def test_promotion(reply, status):
    environment, results = play(position("8/4P1k1/8/8/8/8/8/4K3 w - - 0 1", "e7e8q"), reply)
    assert [r["status"] for r in results] == ([status] if status else [])
    assert environment.reward(reply) == (status == "solved")
    assert environment.behaviour()["malformed"] == (status is None)


@pytest.mark.parametrize("move", ["0000", "e2e5", "a1a1", "e1h1"])  # null, illegal, not a move, castling onto the rook
def test_illegal_moves_leave_the_board_as_it_was(move):
    environment = Environment(position("r3k2r/8/8/8/8/8/4P3/R3K2R w KQkq - 0 1", "e1g1"))
    before = environment.observation()
    environment.on_reply(f"I play {move}.")
    assert environment.act(move, {}) == {"accepted": False, "status": "illegal"}
    assert environment.observation() == before and environment.ended is None and environment.behaviour()["illegal"] == 1


@pytest.mark.parametrize(
    "text, move",
    [
        ("Nf3", None),
        ("e4", None),
        ("e2e4 e7e5", None),
        ("[e2e4] or [d2d4]", None),
        ("[e2e4] ... best is [e2e4]", "e2e4"),
        ("hash a1b2c3d4", None),
        ("code_e2e4x", None),
        ("e2e4.", "e2e4"),
        (" e2e4\n", "e2e4"),
        ("0000", None),
        ("a1a1", None),
        ("--", None),
        ("d2d4? no: <move>e2e4</move>", "e2e4"),
    ],
)
def test_h_0_reads_one_uci_move_and_nothing_else(text, move):
    assert h_0.read_move(text) == move


@pytest.mark.parametrize("text", ["I resign.", "code_e1e8x", "xe1e8", "Re8#", "e1e8=Q", ""])
def test_a_move_that_the_model_never_wrote_earns_nothing(tmp_path, text):
    def plays_the_mate_marked_in_the_legal_moves(task):
        yield Ask([])
        yield Act(next(move.uci for move in task.legal if move.san == "Re8#"))

    environment, results = play(loaded(tmp_path, *TWO_MATES), text, harness=plays_the_mate_marked_in_the_legal_moves)
    assert environment.ended == StopReason.SUBSTITUTED and environment.reward(text) == 0
    assert results == [{"accepted": False, "status": "substituted"}] and not environment.behaviour()["format"]


def test_a_move_of_an_earlier_reply_is_substituted_too(tmp_path):
    environment = Environment(loaded(tmp_path, *TWO_MATES))
    for text in ("e1e8 perhaps", "I don't know"):
        environment.on_reply(text)
    assert environment.act("e1e8", {})["status"] == "substituted" and environment.ended == StopReason.SUBSTITUTED


@pytest.mark.parametrize("text, kind", [("hm", "malformed"), ("d1d8", "illegal")])
def test_no_harness_gets_more_than_ten_retries_of_a_kind(tmp_path, text, kind):
    def never_gives_up(task):
        while True:
            reply = yield Ask([])
            if reply.text != "hm":
                yield Act(reply.text)

    task = loaded(tmp_path, *TWO_MOVES)
    environment, _ = play(task, *[text] * RETRY_LIMIT, "d2d8", "d1d8", harness=never_gives_up)
    assert environment.reward("") == 1  # ten retries are allowed
    environment, _ = play(task, *[text] * (RETRY_LIMIT + 1), "d2d8", "d1d8", harness=never_gives_up)
    assert environment.ended == StopReason.RETRIES and environment.reward("") == 0
    assert environment.behaviour()[kind] == RETRY_LIMIT + 1


@pytest.mark.parametrize(
    "content, words",
    [
        ("", ["empty"]),
        ("PuzzleId,FEN\n00008,x\n", ["header", "Moves", "Themes"]),
        (f"{HEADER}\n{row(1, 'not a fen', 'a7a6 e1e8')}\n", ["FEN", "line 2", "id0001"]),
        (f"{HEADER}\n{row(2, '8/8/8/8/8/8/8/8 b - - 0 1', 'a7a6 e1e8')}\n", ["position", "id0002"]),
        (f"{HEADER}\n{row(3, TWO_MATES[0], 'a7a6 e1e9')}\n", ["legal", "e1e9", "line 2", "id0003"]),
        (f"{HEADER}\n{row(4, TWO_MATES[0], 'a7a6 e8e1')}\n", ["legal", "e8e1", "id0004"]),
        (f"{HEADER}\n{row(5, TWO_MATES[0], 'a7a6 e1e8 h8g8')}\n", ["even", "3", "id0005"]),
        (f"{HEADER}\nid0006,{TWO_MATES[0]},a7a6\n", ["10 columns", "line 2"]),
        (f"{HEADER}\n\n{row(7, TWO_MATES[0], 'a7a6 e1e9')}\n", ["legal", "line 3", "id0007"]),  # after a blank line
        ("\n\n", ["empty"]),
        (b"\x28\xb5\x2f\xfd\x00\xff", [".zst"]),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path, content, words):
    path = tmp_path / "puzzles.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as raised:
        load(str(path))
    assert "\n" not in str(raised.value) and all(word in str(raised.value) for word in ["puzzles.csv", *words])


def test_other_bad_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="none at .*nowhere.csv.*download"):
        load(str(tmp_path / "nowhere.csv"))
    (tmp_path / "text.csv.zst").write_text("PuzzleId,FEN")
    with pytest.raises(ValueError, match="expected zstd data"):
        load(str(tmp_path / "text.csv.zst"))
    path = file_of(tmp_path, *many(8))
    with pytest.raises(ValueError, match="found 0 .*loosen"):
        load(path, themes=["smotheredMate"])
    with pytest.raises(ValueError, match="Rating.*'high'.*id0000"):
        load(file_of(tmp_path, *many(8, rating="high")), rating=(1000, None))


def test_zstd_and_plain_files_give_the_same_splits(tmp_path):
    path = Path(file_of(tmp_path, *many(12)))
    packed = tmp_path / "puzzles.csv.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(path.read_bytes()))
    assert load(str(packed)) == load(str(path)) != load(str(path), seed=1)


def test_blank_lines_are_skipped(tmp_path):
    splits = load(file_of(tmp_path, "", *many(2), "", "", *many(4)[2:], ""))
    tasks = (*splits.weight, *splits.harness, *splits.test)
    assert sorted(task.id for task in tasks) == ["id0000", "id0001", "id0002", "id0003"]


def test_filters(tmp_path):
    rows = [
        *many(6, rating="1000", themes="mate short"),
        *(r.replace("id", "jd") for r in many(6, *TWO_MATES, rating="", themes="oneMove")),
    ]
    path = file_of(tmp_path, *rows)

    def ids(**filters):
        splits = load(path, **filters)
        return {task.id[0] for task in (*splits.weight, *splits.harness, *splits.test)}

    assert ids() == ids(themes=["short", "oneMove"]) == {"i", "j"}
    assert ids(rating=(1000, 1000)) == ids(themes=["short"]) == ids(moves=(2, None)) == {"i"}
    assert ids(moves=(1, 1)) == {"j"}
    with pytest.raises(ValueError, match="found 0"):
        ids(max_legal=3)


def test_splits_are_disjoint_stable_and_shrink_with_the_file(tmp_path):
    splits = load(None)
    parts = [splits.weight, splits.harness, splits.test]
    everything = [task for part in parts for task in part]
    positions = {" ".join(task.observation["fen"].split()[:4]) for task in everything}
    assert len({task.id for task in everything}) == len(positions) == len(everything) >= 4600
    assert (len(splits.harness), len(splits.test)) == (256, 256)
    assert load(None, sizes=(64, 256, 256)).test == splits.test
    doubled = [*many(12), *(r.replace("id", "again") for r in many(12))]  # the same positions under other ids
    small = load(file_of(tmp_path, *doubled))
    assert (len(small.weight), len(small.harness), len(small.test)) == (6, 3, 3)
    shuffled = load(file_of(tmp_path, *reversed(doubled)))
    assert shuffled == small


def test_exam_phrases_are_in_what_is_shown_and_nothing_short(tmp_path):
    task = loaded(tmp_path, *TWO_MATES)
    assert exam_phrases(task) == ["id9999", "7k/6pp/p7/8/8/8/8/K2RR3"]
    assert exam_phrases(position("8/4P1k1/8/8/8/8/8/4K3 w - - 0 1"))[-1] == "8/4P1k1/8/8/8/8/8/4K3"


def test_built_in_puzzles_have_one_solution():
    with BUILT_IN.open(newline="") as file:
        rows = list(csv.DictReader(file))
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for puzzle in random.Random(seed).sample(rows, 60):
        board = chess.Board(puzzle["FEN"])
        setup, *line = puzzle["Moves"].split()
        board.push_uci(setup)
        assert board.is_valid(), puzzle
        if len(line) == 3:
            assert mates_in_one(board, 1) == [], puzzle
            assert [m.uci() for m in board.legal_moves if forces_mate(board, m)] == line[:1], puzzle
            board.push_uci(line[0])
            board.push_uci(line[1])
        mating = []
        for move in board.legal_moves:  # all of them, not those that the maker tries
            board.push(move)
            mating += [move.uci()] if board.is_checkmate() else []
            board.pop()
        assert mating == line[-1:], puzzle
    assert len(rows) >= 4600 and len({puzzle["PuzzleId"] for puzzle in rows}) == len(rows)
    assert len(load(None, sizes=(10_000, 4, 4), max_legal=FEW).weight) >= 1490


@pytest.mark.skipif(not SHARED.exists(), reason=f"a Lichess file is needed at {SHARED}")
def test_a_lichess_file_loads(tmp_path):
    with SHARED.open() as file:
        lines = [line for _, line in zip(range(2001), file, strict=False)]
    (tmp_path / "lichess.csv").write_text("".join(lines))
    splits = load(str(tmp_path / "lichess.csv"), sizes=(1000, 256, 256))
    assert (len(splits.weight), len(splits.harness), len(splits.test)) == (1000, 256, 256)
    assert {task.benchmark for task in splits.weight} == {"Lichess"}
    for task in splits.test:  # the reference, played through h_0, earns R = 1
        environment, _ = play(task, *task.reference["moves"][::2])
        assert environment.reward("") == 1 or len(task.reference["moves"]) > 2 * h_0.ASSISTANT_TURNS
