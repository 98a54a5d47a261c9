"""h_0 of Chess Puzzles with two worked examples in its user prompt, and otherwise the code of h_0.

For a model too small to follow the instruction alone. The examples stand as turns of their own, in the tokens of the
ChatML template that SmolLM2 and Qwen share. Both positions were made up for this file; each has one mate in one.
"""

import re

from harnesses.contract import Act, Ask, fill, system, tool, user

SYSTEM_PROMPT = "Answer each position with one of its legal moves, as in <move>e2e4</move>. Write nothing else."

USER_PROMPT = """Find the best move. Reply with exactly one legal UCI move, as in <move>e2e4</move>.

FEN: 7k/7P/7K/8/7N/8/8/8 w - - 1 40
Board (White to move):
. . . . . . . k
. . . . . . . P
. . . . . . . K
. . . . . . . .
. . . . . . . N
. . . . . . . .
. . . . . . . .
. . . . . . . .
Moves so far: g8h8
Legal moves: h4f3 h4f5 h4g2 h4g6 h6g5 h6g6 h6h5<|im_end|>
<|im_start|>assistant
<move>h4g6</move><|im_end|>
<|im_start|>user
FEN: 7b/8/8/8/3P4/7k/6p1/6K1 b - - 1 40
Board (Black to move):
. . . . . . . b
. . . . . . . .
. . . . . . . .
. . . . . . . .
. . . P . . . .
. . . . . . . k
. . . . . . p .
. . . . . . K .
Moves so far: f1g1
Legal moves: h3g3 h3g4 h3h4 h8d4 h8e5 h8f6 h8g7<|im_end|>
<|im_start|>assistant
<move>h8d4</move><|im_end|>
<|im_start|>user
{position}"""

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
