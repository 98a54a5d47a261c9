"""Chess Puzzles (Section 5.1, Appendix B.2 and B.3): data, environment and verifier.

A row of the Lichess puzzle database gives a FEN and moves in UCI. The first move is the opponent's and sets the puzzle
up; from the second on, solver and opponent alternate. R = 1 only if the solver played all of its reference moves.
"""

import csv
import heapq
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import chess
import zstandard

from data_types import StopReason, Task

TURN_LIMIT = 18  # assistant turns, whatever the harness allows
RETRY_LIMIT = 10  # of each kind, whatever the harness allows
HARNESS = "harnesses/chess_puzzles.py"
SMALL_MODEL_HARNESS = "harnesses/chess_puzzles_examples.py"
BUILT_IN = Path(__file__).with_name("chess_puzzles.csv")
COLUMNS = ("PuzzleId", "FEN", "Moves", "Rating", "Themes")  # the ones read here
UCI_WORD = re.compile(r"(?<!\w)(?:[a-h][1-8][a-h][1-8][a-z]?|0000)(?![\w=])")  # 0000: UCI's null move


@dataclass(frozen=True)
class Splits:
    weight: tuple[Task, ...]
    harness: tuple[Task, ...]
    test: tuple[Task, ...]


def load(
    path: str | None,
    sizes: tuple[int, int, int] = (16384, 256, 256),
    seed: int = 0,
    themes: Sequence[str] = (),
    rating: tuple[int | None, int | None] = (None, None),
    moves: tuple[int | None, int | None] = (1, None),
    max_legal: int | None = None,
) -> Splits:
    """D_weight, D_harness and D_test of these sizes, disjoint by PuzzleId and by the position shown.

    `path` is a lichess_db_puzzle.csv or .csv.zst; None stands for the built-in puzzles. A puzzle passes with any one of
    `themes`, with a rating and a number of solver moves within these bounds (inclusive; without a rating only where no
    bound is set), and with at most `max_legal` legal moves in the first position shown. `seed` and the ids decide which
    puzzles are taken, the order of rows doesn't. If there are too few, test and harness get at most a quarter each.
    Chess is checked for the rows that would be taken, not for all five million.

    Raises FileNotFoundError or ValueError, in one line that says what to do.
    """
    weight, harness, test = sizes
    wanted = max(sum(sizes), 4 * max(harness, test))
    wanted += wanted // 10 + 64  # some rows share a position
    heap: list[tuple[int, int, Task]] = []  # the `wanted` smallest hashes, the largest on top: memory is bounded
    where = Path(path) if path else BUILT_IN
    for line, row in _rows(where):
        place = f"{where.name}, line {line}, puzzle {row['PuzzleId']}"
        if not _passes(row, place, themes, rating, moves):
            continue
        draw = -int.from_bytes(blake2b(f"{seed} {row['PuzzleId']}".encode(), digest_size=8).digest(), "big")
        if len(heap) == wanted and draw <= heap[0][0]:
            continue
        task, legal_moves = _task(row, place, "Lichess" if path else "built-in")
        if max_legal is None or legal_moves <= max_legal:
            heapq.heappush(heap, (draw, -line, task))
            if len(heap) > wanted:
                heapq.heappop(heap)
    tasks = _distinct([task for _, _, task in sorted(heap, reverse=True)])
    if len(tasks) < 4:
        raise _fault("4 or more puzzles that pass the filters", len(tasks), where, "loosen them or use a larger file")
    test, harness = min(test, len(tasks) // 4), min(harness, len(tasks) // 4)
    held_out = test + harness  # taken first, so that they stay the same for any size of weight
    return Splits(tuple(tasks[held_out : held_out + weight]), tuple(tasks[test:held_out]), tuple(tasks[:test]))


def exam_phrases(task: Task) -> list[str]:
    """What quotes this task if it occurs in a harness: its id and the pieces on its board."""
    board = task.observation["fen"].split()[0]
    return [task.id, board] if len(task.id) >= 5 else [board]  # a shorter id can occur by chance


def _rows(where: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row) of a puzzle file. Raises ValueError on anything that isn't one."""
    if not where.is_file():
        raise FileNotFoundError(
            f"expected a Lichess puzzle file, found none at {where}: download lichess_db_puzzle.csv.zst from "
            "https://database.lichess.org/#puzzles, or name no file to use the built-in puzzles"
        )
    with where.open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file) if where.suffix == ".zst" else file
        reader = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
        try:
            rows = filter(None, reader)  # without blank lines
            header = next(rows, None)
            if header is None:
                raise _fault("a header and puzzles", "nothing", where, "the file is empty, download it again")
            if missing := ", ".join(name for name in COLUMNS if name not in header):
                raise _fault(f"a header with {', '.join(COLUMNS)}", f"none of {missing}", where, "add the header line")
            for row in rows:
                if len(row) != len(header):
                    place = f"{where.name}, line {reader.line_num}"
                    raise _fault(f"{len(header)} columns", len(row), place, "if it was cut off, download it again")
                yield reader.line_num, dict(zip(header, row, strict=True))
        except zstandard.ZstdError as error:
            raise _fault("zstd data", f"other bytes ({error})", where, "download it again") from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise _fault("CSV text", f"other bytes ({error})", where, "a compressed file must end in .zst") from None


def _fault(expected: str, found: object, where: object, remedy: str) -> ValueError:
    return ValueError(f"expected {expected}; found {found} in {where}: {remedy}")


def _passes(row: dict[str, str], place: str, themes: Sequence[str], rating: tuple, moves: tuple) -> bool:
    """The filters that need no chess."""
    count = len(row["Moves"].split())
    if count < 2 or count % 2:
        raise _fault("an even number of moves, the opponent's first", count, place, "correct or remove the row")
    if not _within(count // 2, moves) or (themes and not set(themes) & set(row["Themes"].split())):
        return False
    return rating == (None, None) or (row["Rating"] != "" and _within(_rating(row, place), rating))


def _within(value: int, bounds: tuple[int | None, int | None]) -> bool:
    low, high = bounds
    return (low is None or value >= low) and (high is None or value <= high)


def _rating(row: dict[str, str], place: str) -> int | None:
    if row["Rating"] and not row["Rating"].isdecimal():
        raise _fault("a whole number as Rating", repr(row["Rating"]), place, "correct or remove the row")
    return int(row["Rating"]) if row["Rating"] else None


def _task(row: dict[str, str], place: str, benchmark: str) -> tuple[Task, int]:
    """The task of a row and its number of legal moves; every move of the row is checked."""
    try:
        board = chess.Board(row["FEN"])
    except ValueError as error:
        raise _fault("a FEN", f"{row['FEN']!r} ({error})", place, "correct or remove the row") from None
    if not board.is_valid():
        raise _fault("a position of chess", repr(row["FEN"]), place, "correct or remove the row")
    setup, *solution = row["Moves"].split()
    shown = None
    for uci in (setup, *solution):
        legal = _legal(board)
        if uci not in legal:
            raise _fault("legal moves from the FEN on", uci, place, "correct or remove the row")
        board.push(legal[uci])
        shown = shown or board.copy(stack=False)
    # Themes such as mateIn1 would tell the answer, so they stay with the reference.
    reference = {"moves": solution, "themes": row["Themes"].split(), "rating": _rating(row, place)}
    observation = {"fen": shown.fen(), "history": [setup]}  # Environment.observation adds what follows from it
    return Task(row["PuzzleId"], benchmark, observation, reference), shown.legal_moves.count()


def _distinct(tasks: list[Task]) -> list[Task]:
    """Without those whose id or position, clocks aside, came before."""
    seen, kept = set(), []
    for task in tasks:
        position = " ".join(task.observation["fen"].split()[:4])
        if not {task.id, position} & seen:
            kept.append(task)
        seen |= {task.id, position}
    return kept


def _legal(board: chess.Board) -> dict[str, chess.Move]:
    """UCI -> move. Membership is the test of legality: python-chess pushes illegal moves and null moves unasked."""
    return {move.uci(): move for move in board.legal_moves}


@lru_cache(maxsize=4096)  # SAN is dear, and every rollout of a task asks for the same positions
def _position(fen: str) -> dict[str, Any]:
    board = chess.Board(fen)
    legal = [{"uci": uci, "san": board.san(move)} for uci, move in sorted(_legal(board).items())]
    return {"fen": fen, "side": "White" if board.turn else "Black", "board": str(board), "legal": legal}


class Environment:
    """One episode. It never repairs a move: no promotion piece is added, nothing is read but UCI."""

    def __init__(self, task: Task):
        self.ended: StopReason | None = None
        self._reference = task.reference
        self._board = chess.Board(task.observation["fen"])
        self._history = list(task.observation["history"])
        self._played = 0  # moves of the reference, the opponent's too
        self._reply = ""  # the latest that was sampled
        self._replies = 0
        self._acted_in_first_turn = False
        self._mate_not_reference = False
        self._counts: Counter[str] = Counter()  # replies: legal, illegal, or malformed as nothing was acted on

    def observation(self) -> dict[str, Any]:
        """JSON-able: fen, side (White, Black), board (ASCII), legal [{uci, san}], history [uci], set-up move first."""
        return _position(self._board.fen()) | {"history": list(self._history)}

    def on_ask(self) -> StopReason | None:
        """Before each model turn. An ask after a reply without a legal move is a retry; too many end the episode."""
        if max(self._counts["malformed"], self._counts["illegal"]) > RETRY_LIMIT:
            self.ended = StopReason.RETRIES
        return self.ended

    def on_reply(self, text: str) -> None:
        self._reply = text
        self._replies += 1
        self._counts["malformed"] += 1  # until something is acted on

    def act(self, action: str, options: dict) -> dict[str, Any]:
        """Plays one UCI move of the latest reply; lower-casing is parsing and allowed. `options` has no keys.

        The result has `accepted` and `status`: "accepted", with `reply`, the opponent's move, and all of `observation`;
        "illegal", and the board stays; or, when the episode has ended, "solved", "wrong" (legal but not the reference)
        or "substituted" (the model didn't write it).
        """
        uci = action.strip().lower()
        if uci not in UCI_WORD.findall(self._reply.lower()):
            self.ended = StopReason.SUBSTITUTED
            return {"accepted": False, "status": "substituted"}
        self._counts["malformed"] -= 1
        self._acted_in_first_turn |= self._replies == 1
        legal = _legal(self._board)
        if uci not in legal:
            self._counts["illegal"] += 1
            return {"accepted": False, "status": "illegal"}
        self._counts["legal"] += 1
        self._push(legal[uci])
        if uci != self._reference["moves"][self._played]:
            # Lichess lets any mate win; the paper's verifier asks for the reference move (B.3).
            self._mate_not_reference = self._board.is_checkmate()
            self.ended = StopReason.ENVIRONMENT
            return {"accepted": False, "status": "wrong"}
        self._played += 1
        if self._played == len(self._reference["moves"]):
            self.ended = StopReason.ENVIRONMENT
            return {"accepted": True, "status": "solved"}
        reply = self._reference["moves"][self._played]
        self._push(chess.Move.from_uci(reply))
        self._played += 1
        return {"accepted": True, "status": "accepted", "reply": reply} | self.observation()

    def reward(self, last_reply: str) -> int:
        """R = 1 only for the whole reference sequence, as played on this board; the last reply's text doesn't count."""
        return int(self._played == len(self._reference["moves"]))

    def behaviour(self) -> dict[str, Any]:
        """For figures and tables. `reference` holds what the hidden reference tells: the archive leaves it out."""
        return {
            "format_first": self._acted_in_first_turn,  # one move could be read from the first reply
            "format": self._counts["legal"] + self._counts["illegal"] > 0,  # ... from any reply
            "legal": self._counts["legal"] > 0,
            "illegal": self._counts["illegal"],
            "malformed": self._counts["malformed"],
            "solved_moves": (self._played + 1) // 2,
            "mate_not_reference": self._mate_not_reference,
            "reference": {
                "solver_moves": (len(self._reference["moves"]) + 1) // 2,
                "mate": "mate" in self._reference["themes"],
            },
        }

    def _push(self, move: chess.Move) -> None:
        self._board.push(move)
        self._history.append(move.uci())
