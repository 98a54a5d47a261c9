"""The slot sampler against plain generate: the same tokens, whatever shares the batch, and the same across turns."""

import random
from collections import Counter

import pytest
import torch

from model import Policy
from sampler import Request, converse_plain, draw, perturbed
from slots import SlotSampler, shared_prefixes

EOS = {2, 5, 6}
CLOSE = 1e-4  # two best perturbed scores closer than this may swap: counted, not hidden


def requests_of(seed: int, n: int = 24) -> list[tuple[int, Request]]:
    """n replies of different lengths to n / 3 prompts that share a start."""
    rng = random.Random(seed)
    start = [rng.randrange(10, 250) for _ in range(20)]
    prompts = [tuple(start + [rng.randrange(10, 250) for _ in range(rng.choice([1, 3, 7, 20, 64, 65, 90]))])
               for _ in range(n // 3)]  # fmt: skip
    return [(i, Request(prompts[i // 3], 1000 + i, 1 + (5 + 11 * i) % 40)) for i in range(n)]


def replies(converse, requests) -> dict:
    found = {}
    converse(requests, lambda ended: found.update(ended) or [])
    return found


def plain(model, temperature):
    return lambda requests, answer: converse_plain(
        model, requests, answer, EOS, temperature=temperature, top_k=20, top_p=1.0
    )


def slots(model, temperature, n, positions=256, **options):
    return SlotSampler(model, EOS, temperature, 20, 1.0, n, positions, **options).converse


def margin(model, request: Request, ids: list[int], temperature: float) -> float:
    """By how much the best perturbed score beats the next one after this start of a reply."""
    context = torch.tensor([[*request.context, *ids]])
    with torch.no_grad():
        logits = model(context).logits[:, -1]
    seed, position = torch.tensor([request.seed]), torch.tensor([context.shape[1]])
    best = perturbed(logits, seed, position, temperature, 20, 1.0)[0].topk(2).values[0]
    return (best[0] - best[1]).item()


def agree(model, temperature, requests, ours: dict, reference: dict, count: Counter) -> None:
    for key, request in requests:
        if ours[key].ids != reference[key].ids:
            same = next(i for i, (a, b) in enumerate(zip(ours[key].ids, reference[key].ids, strict=False)) if a != b)
            assert margin(model, request, reference[key].ids[:same], temperature) < CLOSE
            count["close calls"] += 1
        else:
            gap = [abs(a - b) for a, b in zip(ours[key].logprobs, reference[key].logprobs, strict=True)]
            assert max(gap) < 1e-4 and ours[key].finish == reference[key].finish


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_the_tokens_of_plain_generate_for_any_batch(tiny, architecture, temperature):
    model, count = Policy.load(str(tiny(architecture))).model.eval(), Counter()
    requests = requests_of(0)
    reference = replies(plain(model, temperature), requests)
    for n, chunk in ((32, 4), (3, 3), (1, 7)):  # all at once; refill and compaction; alone
        agree(
            model, temperature, requests, replies(slots(model, temperature, n, chunk=chunk), requests), reference, count
        )
    print(dict(count))
    assert count["close calls"] <= 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_later_turns_extend_rewrite_or_begin_anew(tiny, architecture):
    """Three more turns each: two extend the context, one rewrites it."""
    model = Policy.load(str(tiny(architecture))).model.eval()

    def dialogue(converse):
        context, log = dict(requests_of(1)), {i: [] for i in range(24)}

        def answer(ended):
            following = []
            for key, sample in ended:
                log[key].append(sample.ids)
                if len(log[key]) < 4:
                    before = context[key].context if len(log[key]) != 2 else context[key].context[:5]  # 2: rewritten
                    inserted = tuple((7 * key + j) % 200 + 10 for j in range(1 + key * 5 % 23))
                    context[key] = Request((*before, *sample.ids, *inserted), 50 * key + len(log[key]), 10)
                    following.append((key, context[key]))
            return following

        converse(requests_of(1), answer)
        return log

    reference = dialogue(plain(model, 1.0))
    for n in (32, 3, 1):
        assert dialogue(slots(model, 1.0, n, positions=400, chunk=4)) == reference


def test_a_reply_may_end_at_the_last_position_and_at_its_first_token(tiny):
    model = Policy.load(str(tiny())).model.eval()
    requests = [(0, Request(tuple(range(10, 60)), 1, 14)), (1, Request((10, 11), 2, 1)), (2, Request((12,), 3, 63))]
    reference = replies(plain(model, 1.0), requests)
    ours = replies(slots(model, 1.0, 2, positions=64), requests)
    assert {key: sample.ids for key, sample in ours.items()} == {key: sample.ids for key, sample in reference.items()}


def test_weights_changed_in_place_are_used_at_once(tiny):
    model = Policy.load(str(tiny())).model.eval()
    sampler, requests = slots(model, 1.0, 8), requests_of(2)
    replies(sampler, requests)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    after, reference = replies(sampler, requests), replies(plain(model, 1.0), requests)
    assert {k: s.ids for k, s in after.items()} == {k: s.ids for k, s in reference.items()}


def test_the_noise_is_a_gumbel_of_seed_position_and_token_alone():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(40_000, 4)
    seed, position = torch.arange(40_000), torch.full((40_000,), 7)
    token, logp = draw(logits, seed, position, 1.0, 0, 1.0)
    share = torch.bincount(token, minlength=4) / 40_000
    assert (share - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().max() < 0.01
    assert torch.allclose(logp, logits[0][token])
    again, _ = draw(logits[:3], seed[:3], position[:3], 1.0, 0, 1.0)
    assert again.tolist() == token[:3].tolist()
    kept, _ = draw(logits, seed, position, 1.0, 0, 0.6)  # 0.4 and 0.3 reach 0.6
    assert set(kept.tolist()) == {2, 3}
    assert set(draw(logits, seed, position, 1.0, 2, 1.0)[0].tolist()) == {2, 3}


@pytest.mark.parametrize("length", [47, 48, 49])
def test_no_context_length_steps_over_the_edge_of_a_size(tiny, length):
    model = Policy.load(str(tiny())).model.eval()
    requests = [(0, Request(tuple(10 + i for i in range(length)), 1, 40))]
    assert replies(slots(model, 1.0, 1, chunk=16), requests)[0].ids == replies(plain(model, 1.0), requests)[0].ids


def test_a_prompt_takes_over_what_half_of_it_or_more_shares_with_another():
    a, b, c, d = (1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 9, 9, 9), (7, 7, 7)
    assert list(shared_prefixes([d, c, b, a], held={})) == [(a, a, 0), (b, a, 3), (c, c, 0), (d, d, 0)]
    assert list(shared_prefixes([a, b, c], held={b: 5})) == [(a, a, 0), (b, b, 4), (c, c, 0)]
