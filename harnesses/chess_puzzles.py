"""h_0 of Chess Puzzles (Section B.2): the whole position, one UCI move, one retry of each kind, nine turns."""

import re

from harnesses.contract import Act, Ask, fill, system, tool, user

SYSTEM_PROMPT = "Answer each position with one of its legal moves, as in <move>e2e4</move>. Write nothing else."

USER_PROMPT = """{position}

Find the best move. Reply with exactly one legal UCI move, as in <move>e2e4</move>."""

MALFORMED = "I could not read exactly one UCI move in your reply. Reply with exactly one, as in <move>e2e4</move>."
ILLEGAL = "The move {move} is not legal here. Reply with exactly one move from the list of legal moves."
ASSISTANT_TURNS = 9
RETRIES = 1  # of each kind


def harness(task):
    messages = [system(SYSTEM_PROMPT), user(fill(USER_PROMPT, position=show(task)))]
    retries = {"malformed": RETRIES, "illegal": RETRIES}
    for _ in range(ASSISTANT_TURNS):
        reply = yield Ask(messages)
        messages.append(reply)
        move = read_move(reply.text)
        if move is None:
            problem, feedback = "malformed", MALFORMED
        else:
            result = yield Act(move)
            if result.accepted:
                messages.append(tool(after_accepted(result)))
                continue
            problem, feedback = "illegal", fill(ILLEGAL, move=move)
        if retries[problem] == 0:
            return
        retries[problem] -= 1
        messages.append(tool(feedback))


def show(position):
    """The board observation: FEN, ASCII board, complete move history, flat legal-move list."""
    return "\n".join(
        [
            f"FEN: {position.fen}",
            f"Board ({position.side} to move):",
            position.board,
            f"Moves so far: {' '.join(position.history)}",
            f"Legal moves: {show_legal(position.legal)}",
        ]
    )


def show_legal(legal):
    return " ".join(move.uci for move in legal)


def after_accepted(result):
    return f"Correct. The opponent replies {result.reply}.\n\n{show(result)}\n\nFind the next move."


def read_move(text):
    """The one UCI move of a reply: what the last <move> tag holds, else all of the text; None if none or several."""
    tagged = re.findall(r"<move>(.*?)</move>", text, re.DOTALL)
    found = re.findall(r"(?<!\w)[a-h][1-8][a-h][1-8][a-z]?(?![\w=])", (tagged[-1] if tagged else text).lower())
    moves = {move for move in found if move[:2] != move[2:4]}
    return moves.pop() if len(moves) == 1 else None
