"""Makes domains/chess_puzzles.csv: mates in one and in two with exactly one solution, all of our own making.

    python -m domains.make_chess_puzzles --engine /usr/games/stockfish --seed 0 --out domains/chess_puzzles.csv

The file that ships was made by this command with Stockfish 15.1 (Debian package 15.1-4) and python-chess 1.11.2, in two
parts. Puzzles with more than FEW legal moves come from noisy games of the engine against itself; each legal move of a
game's positions is tried as the blunder that sets up a mate in one, the game's own move first. Puzzles with at most FEW
come from random sparse endgame positions, where each legal move of the defender is tried as the set-up move. The engine
only chooses the moves of the games: that a puzzle has one solution is found by trying all moves with python-chess.
Nothing is taken from Lichess but the format of its puzzle database: the first move of a row is the opponent's, and
columns without a value are empty.
"""

import argparse
import csv
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import chess
import chess.engine

COLUMNS = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags".split(",")
FEW = 12  # legal moves; what models small enough for a CPU can read
FROM_GAMES = {1: 2200, 2: 900}  # mate in so many moves: puzzles wanted
FROM_SPARSE = {1: 1100, 2: 450}
PER_GAME = 10
PLIES = 120
NODES = 100  # the engine's search for each move of a game
PIECES = (chess.KNIGHT, chess.BISHOP, chess.ROOK, chess.QUEEN)
EDGE = [s for s in chess.SQUARES if chess.square_rank(s) in (0, 7) or chess.square_file(s) in (0, 7)]


@dataclass(frozen=True)
class Puzzle:
    fen: str  # before the opponent's set-up move
    moves: tuple[chess.Move, ...]
    key: str  # the position shown to the solver, without clocks
    themes: str


def mates_in_one(board: chess.Board, at_most: int) -> list[chess.Move]:
    """The mating moves of the side to move; the search stops after `at_most` of them."""
    found = []
    for move in moves_that_may_check(board):
        board.push(move)
        if board.is_checkmate():
            found.append(move)
        board.pop()
        if len(found) == at_most:
            break
    return found


def moves_that_may_check(board: chess.Board) -> Iterable[chess.Move]:
    """All legal moves, less those that can't give check: they start and end off every line to the king."""
    if board.ep_square is not None:  # taking en passant opens the line of the pawn taken
        return board.legal_moves
    king = board.king(not board.turn)
    lines = chess.BB_KNIGHT_ATTACKS[king] | chess.BB_DIAG_ATTACKS[king][0]
    lines |= chess.BB_RANK_ATTACKS[king][0] | chess.BB_FILE_ATTACKS[king][0]
    starts = lines | board.kings  # of the king's moves castling can check with the rook
    return itertools.chain(board.generate_legal_moves(starts), board.generate_legal_moves(~starts, lines))


def forces_mate(board: chess.Board, move: chess.Move) -> bool:
    """Has every reply to this move a mate in one?"""
    board.push(move)
    replies = list(board.legal_moves)
    forced = bool(replies)  # no reply and no mate: stalemate
    for reply in replies:
        board.push(reply)
        forced = bool(mates_in_one(board, 1))
        board.pop()
        if not forced:
            break
    board.pop()
    return forced


def mate_in_two(board: chess.Board, rng: random.Random) -> list[chess.Move]:
    """The three moves of the only mate in two, with a reply that leaves one mating move; [] if there is none."""
    first = []
    for move in board.legal_moves:
        if forces_mate(board, move):
            first.append(move)
        if len(first) == 2:
            return []
    if not first:
        return []
    board.push(first[0])
    lines = []
    for reply in list(board.legal_moves):
        board.push(reply)
        mates = mates_in_one(board, 2)
        board.pop()
        if len(mates) == 1:
            lines.append([first[0], reply, mates[0]])
    board.pop()
    return rng.choice(lines) if lines else []


def themes(board: chess.Board, solver_moves: int) -> str:
    """In Lichess's words; the phase by our own rule: pieces other than kings and pawns, then the move number."""
    pieces = chess.popcount(board.occupied & ~board.kings & ~board.pawns)
    phase = "endgame" if pieces <= 6 else "opening" if board.fullmove_number <= 12 else "middlegame"
    return f"{phase} mate " + ("mateIn1 oneMove" if solver_moves == 1 else "mateIn2 short")


def puzzle_after(board: chess.Board, setup: chess.Move, mate_in: int, few: bool, rng: random.Random) -> Puzzle | None:
    """The mate in one or two, with few legal moves or more, that this set-up move makes; None if it makes none."""
    fen, line = board.fen(), []
    board.push(setup)
    if (board.legal_moves.count() <= FEW) == few:
        mates = mates_in_one(board, 2)
        if mate_in == 1 and len(mates) == 1:
            line = mates
        elif mate_in == 2 and not mates:
            line = mate_in_two(board, rng)
    key = " ".join(board.fen().split()[:4])
    puzzle = Puzzle(fen, (setup, *line), key, themes(board, mate_in)) if line else None
    board.pop()
    return puzzle


def game(engine: chess.engine.SimpleEngine, number: int, rng: random.Random) -> Iterator[tuple]:
    """Noisy self-play from the start position: (position, the move played in it, does the engine then see a mate?)."""
    board = chess.Board()
    noise = {color: rng.choice((0.05, 0.15, 0.3)) for color in chess.COLORS}  # the rate of random moves
    while len(board.move_stack) < PLIES and not board.is_game_over() and board.halfmove_clock < 30:
        limit = chess.engine.Limit(nodes=NODES)
        best = engine.play(board, limit, game=number, info=chess.engine.INFO_SCORE)
        if board.move_stack:
            score = best.info.get("score")
            before = board.copy()
            played = before.pop()
            yield before, played, bool(score and (score.relative.mate() or 0) > 0)
        board.push(rng.choice(list(board.legal_moves)) if rng.random() < noise[board.turn] else best.move)


def puzzles_of_game(plies: Iterable[tuple], mate_in: int, rng: random.Random) -> Iterator[Puzzle]:
    """At most one puzzle for each position of a game: of the move played in it, or for mates in one of another move."""
    for board, played, sees_mate in plies:
        setups = [played] if sees_mate else []
        if mate_in == 1:
            setups = [played, *rng.sample(others := [m for m in board.legal_moves if m != played], len(others))]
        puzzles = (puzzle_after(board, setup, mate_in, False, rng) for setup in setups)
        yield from itertools.islice(filter(None, puzzles), 1)


def from_games(engine_path: str, seed: int, mate_in: int) -> list[Puzzle]:
    rng = random.Random(f"games {seed} {mate_in}")
    with chess.engine.SimpleEngine.popen_uci(engine_path) as engine:
        engine.configure({"Threads": 1, "Hash": 1})
        games = (puzzles_of_game(game(engine, number, rng), mate_in, rng) for number in itertools.count())
        some = itertools.chain.from_iterable(itertools.islice(puzzles, PER_GAME) for puzzles in games)
        return distinct(some, FROM_GAMES[mate_in], f"mates in {mate_in} from games")


def sparse_position(rng: random.Random) -> chess.Board:
    """A random legal endgame position, the defender to move, with its king at the edge and most pieces near it."""
    while True:
        board, solver, defender = chess.Board(None), *rng.sample(chess.COLORS, 2)
        king = rng.choice(EDGE)
        board.set_piece_at(king, chess.Piece(chess.KING, defender))

        def put(kind: chess.PieceType, color: chess.Color, near: float, board=board, king=king) -> None:
            """Somewhere free; with this probability within three king's steps of the defender's king."""
            reach = 3 if rng.random() < near else 8
            while True:
                square = rng.choice(chess.SQUARES)
                ranks = range(1, 7) if kind == chess.PAWN else range(8)
                if chess.square_distance(square, king) <= reach and chess.square_rank(square) in ranks:
                    if not board.piece_at(square):
                        return board.set_piece_at(square, chess.Piece(kind, color))

        put(chess.KING, solver, near=0.7)
        for kind in rng.choices(PIECES, (4, 4, 3, 1), k=rng.randint(1, 2)) + [chess.PAWN] * rng.randint(0, 2):
            put(kind, solver, near=0.5)
        for kind in rng.choices((chess.PAWN, *PIECES), (6, 2, 2, 2, 1), k=rng.randint(1, 5)):
            put(kind, defender, near=0.7)
        board.turn, board.fullmove_number = defender, rng.randint(35, 60)
        if board.is_valid() and not board.is_game_over():
            return board


def from_sparse_positions(seed: int, mate_in: int) -> list[Puzzle]:
    """At most one puzzle for each random position."""
    rng = random.Random(f"sparse {seed} {mate_in}")
    boards = (sparse_position(rng) for _ in itertools.count())
    each = ((puzzle_after(board, setup, mate_in, True, rng) for setup in list(board.legal_moves)) for board in boards)
    some = itertools.chain.from_iterable(itertools.islice(filter(None, puzzles), 1) for puzzles in each)
    return distinct(some, FROM_SPARSE[mate_in], f"mates in {mate_in} from sparse positions")


def distinct(puzzles: Iterable[Puzzle], wanted: int, name: str) -> list[Puzzle]:
    """The first so many of these puzzles, no position twice."""
    made: dict[str, Puzzle] = {}
    for puzzle in puzzles:
        made.setdefault(puzzle.key, puzzle)
        if len(made) % 50 == 0:
            print(f"{name}: {len(made)} of {wanted}", file=sys.stderr, flush=True)
        if len(made) == wanted:
            return list(made.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="/usr/games/stockfish", help="a UCI engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="domains/chess_puzzles.csv")
    args = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:  # the same seed, engine and libraries make the same file
        parts = [pool.submit(from_games, args.engine, args.seed, mate_in) for mate_in in FROM_GAMES]
        parts += [pool.submit(from_sparse_positions, args.seed, mate_in) for mate_in in FROM_SPARSE]
        puzzles = [puzzle for part in parts for puzzle in part.result()]
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for number, puzzle in enumerate(puzzles):
            moves = " ".join(move.uci() for move in puzzle.moves)
            writer.writerow({"PuzzleId": f"w{number:05}", "FEN": puzzle.fen, "Moves": moves, "Themes": puzzle.themes})


if __name__ == "__main__":
    main()
