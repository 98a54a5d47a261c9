"""Tokens in, tokens out: what a context is, what a training row is, and which tokens the mask marks."""

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig

from data_types import Message, StopReason, Trajectory, Turn
from model import Policy, TemplateError
from rsft import training_sequences
from sampler import Draw, Request, Sample, finish

M = Message


def policy(tiny, template="smollm2", thinking=None) -> Policy:
    return Policy.load(str(tiny("llama", template)), thinking=thinking)


def replies(p: Policy, requests) -> list[Sample]:
    """One reply to each request."""
    found = {}
    p.converse(list(enumerate(requests)), lambda ended: found.update(ended) or [], positions=64)
    return [found[i] for i in range(len(requests))]


def turn(p: Policy, messages, turns, reply: str, end="<|im_end|>") -> Turn:
    """A turn as if the model had sampled this reply."""
    context, text = p.encode(messages, turns)
    ids = tuple(p.tokenizer(reply + end, add_special_tokens=False)["input_ids"])
    return Turn(context, ids, (0.0,) * len(ids), reply, "stop" if end else "length", text)


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory("task", "test", 0, 0, 1, StopReason.DONE, turns)


def spans(p: Policy, row) -> list[tuple[bool, str]]:
    """A row as alternating (sampled or not, text)."""
    out: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(row.ids, row.mask, strict=True):
        if not out or out[-1][0] != sampled:
            out.append((sampled, []))
        out[-1][1].append(token)
    return [(sampled, p.tokenizer.decode(ids)) for sampled, ids in out]


def test_labels_are_the_sampled_ids_not_their_text_encoded_again(tiny):
    p = policy(tiny)
    assert len(p.tokenizer("hello", add_special_tokens=False)["input_ids"]) == 1
    pieces = [p.tokenizer(piece, add_special_tokens=False)["input_ids"][0] for piece in ("h", "e", "l", "l", "o")]
    context, text = p.encode([M("user", "q")], [])
    said = Turn(context, (*pieces, 2), (0.0,) * 6, p.decode([*pieces, 2]), "stop", text)
    assert said.text == "hello"
    after, _ = p.encode([M("user", "q"), M("assistant", turn=0), M("tool", "x")], [said])
    assert after[: len(context) + 6] == (*context, *pieces, 2)
    (row,) = training_sequences(trajectory(said))
    assert [i for i, sampled in zip(row.ids, row.mask, strict=True) if sampled] == [*pieces, 2]


def test_the_template_text_between_turns_is_whole_and_not_trained(tiny):
    p = policy(tiny, "qwen3.5-2b")
    first = turn(p, [M("user", "q")], [], "call")
    second = turn(p, [M("user", "q"), M("assistant", turn=0), M("tool", "out")], [first], "done")
    (row,) = training_sequences(trajectory(first, second))
    assert spans(p, row) == [
        (False, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (True, "call<|im_end|>"),
        (
            False,
            "\n<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (True, "done<|im_end|>"),
    ]


@pytest.mark.parametrize("template,thinking,reply", [
    ("smollm2", None, " padded reply \n"),
    ("smollm2", None, "<think>\nmy plan\n</think>\n\ncall"),  # a template that keeps reasoning as it keeps any text
    ("qwen3.5-2b", None, " padded reply \n"),
    ("qwen3.5-4b", True, "my plan\n</think>\n\ncall"),
])  # fmt: skip
def test_one_row_where_the_environment_answers_as_a_tool(tiny, template, thinking, reply):
    p = policy(tiny, template, thinking)
    messages, turns = [M("system", "s"), M("user", "q")], []
    for i in range(3):
        turns.append(turn(p, messages, turns, reply))
        messages += [M("assistant", turn=i), M("tool", f"result {i}")]
    rows = training_sequences(trajectory(*turns))
    assert len(rows) == 1
    assert sum(rows[0].mask) == sum(len(t.sampled_ids) for t in turns)
    text = p.tokenizer.decode(rows[0].ids)
    assert text.count("<think>") == text.count("</think>") == (3 if "think" in reply or template != "smollm2" else 0)


def test_a_user_message_drops_earlier_reasoning_so_a_new_row_begins(tiny):
    p = policy(tiny, "qwen3.5-4b", thinking=True)
    first = turn(p, [M("user", "q")], [], "plan\n</think>\n\ncall")
    second = turn(p, [M("user", "q"), M("assistant", turn=0), M("user", "feedback")], [first], "more\n</think>\n\nend")
    assert "plan" not in p.tokenizer.decode(second.context_ids)
    rows = training_sequences(trajectory(first, second))
    assert [row.ids for row in rows] == [first.context_ids + first.sampled_ids, second.context_ids + second.sampled_ids]
    assert [sum(row.mask) for row in rows] == [len(first.sampled_ids), len(second.sampled_ids)]


def test_a_rewritten_history_begins_a_new_row_with_the_context_that_was_seen(tiny):
    p = policy(tiny)
    first = turn(p, [M("user", "q")], [], "one")
    second = turn(p, [M("user", "q"), M("assistant", "ONE, shortened"), M("tool", "x")], [first], "two")
    third_messages = [
        M("user", "q"),
        M("assistant", "ONE, shortened"),
        M("tool", "x"),
        M("assistant", turn=1),
        M("tool", "y"),
    ]
    third = turn(p, third_messages, [first, second], "three")
    rows = training_sequences(trajectory(first, second, third))
    assert len(rows) == 2
    assert rows[0].ids == first.context_ids + first.sampled_ids
    assert rows[1].ids == third.context_ids + third.sampled_ids
    assert sum(rows[1].mask) == len(second.sampled_ids) + len(third.sampled_ids)


def test_a_cut_off_reply_gets_no_end_token_to_learn(tiny):
    p = policy(tiny)
    first = turn(p, [M("user", "q")], [], "cut off", end="")
    second = turn(p, [M("user", "q"), M("assistant", turn=0), M("tool", "go on")], [first], "end")
    (row,) = training_sequences(trajectory(first, second))
    assert spans(p, row)[1:3] == [
        (True, "cut off"),
        (False, "<|im_end|>\n<|im_start|>tool\ngo on<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_a_clipped_text_has_no_more_tokens_than_allowed(tiny):
    p = policy(tiny)
    assert [len(p._tokens(text)) for text in ("🙂", "a🙂b")] == [4, 6]  # a token for each byte
    assert [p.clip("🙂", n) for n in range(5)] == ["", "", "", "", "🙂"]
    assert [p.clip("a🙂b", n) for n in range(7)] == ["", "a", "a", "a", "a", "a🙂", "a🙂b"]


def test_a_reply_ends_at_its_first_end_token_whatever_the_padding_is():
    assert finish([11, 12, 1, 1, 1], 5, {1}) == (3, "stop")
    assert finish([11, 12, 13, 14], 4, {1}) == (4, "length")
    assert finish([11, 12, 13, 1], 3, {1}) == (3, "length")


def test_generation_config_of_the_folder_adds_no_sampling_setting(tiny, tmp_path):
    folder = shutil.copytree(tiny(), tmp_path / "model")
    hostile = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3,
               "max_length": 17, "eos_token_id": [2, 0]}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(hostile))
    p, seen = Policy.load(str(folder), sampler="plain"), []
    assert p.eos_ids == {0, 2}
    inner = p.actor._get_logits_processor

    def spy(*args, **kwargs):
        seen.append(inner(*args, **kwargs))
        return seen[-1]

    p.actor._get_logits_processor = spy
    (sample,) = replies(p, [Request((5, 6, 7), 1, 30)])
    assert [type(processor) for processors in seen for processor in processors] == [Draw]
    assert p.actor.generation_config.repetition_penalty in (None, GenerationConfig().repetition_penalty)
    assert len(sample.ids) == 30 or sample.finish == "stop"


@pytest.mark.parametrize("messages", [
    [M("user", "q"), M("system", "s"), M("user", "q")],
    [M("system", "s")],
    [M("user", "q"), M("environment", "e")],
])  # fmt: skip
def test_a_template_that_refuses_raises_template_error(tiny, messages):
    with pytest.raises(TemplateError):
        policy(tiny, "qwen3.5-2b").encode(messages, [])


@pytest.mark.parametrize("sampler", ["plain", "slots"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_sampled_logprobs_are_those_of_one_forward_and_do_not_depend_on_the_batch(tiny, architecture, sampler):
    p = Policy.load(str(tiny(architecture)), sampler=sampler)
    requests = [Request(tuple(range(10, 10 + n)), seed, 12) for n, seed in ((3, 1), (9, 2), (5, 3), (5, 4))]
    together, alone = replies(p, requests), [replies(p, [request])[0] for request in requests]
    assert [s.ids for s in together] == [s.ids for s in alone]
    for request, sample in zip(requests, together, strict=True):
        ids = torch.tensor([list(request.context) + sample.ids])
        with torch.no_grad():
            logits = p.model(ids).logits[0, len(request.context) - 1 : -1].log_softmax(-1)
        forward = logits.gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        assert (forward - torch.tensor(sample.logprobs)).abs().max() < 1e-4
