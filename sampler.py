"""How a token is drawn, and plain `generate` with that draw: the reference for every faster way to sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList

try:
    import decode_kernels as kernels
except ImportError:  # no Triton, as on machines without a GPU
    kernels = None


@dataclass(frozen=True)
class Request:
    """One assistant turn to sample: its context, the seed of its noise, and how many tokens it may take."""

    context: tuple[int, ...]
    seed: int  # 63 bits
    max_tokens: int
    stop: tuple[str, ...] = ()  # the reply ends with the token that completes one of these texts


@dataclass(frozen=True)
class Sample:
    ids: list[int]  # (sampled,) with the end token, if the model wrote one
    logprobs: list[float]  # (sampled,)
    finish: str  # "stop" or "length"


def fused(device: torch.device) -> bool:
    """Whether the kernels run there."""
    return kernels is not None and device.type == "cuda"


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on wrapping int64: every output bit depends on every input bit."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def perturbed(logits, seed, position, temperature: float, top_k: int, top_p: float):
    """Each row's candidates with Gumbel noise that is a function of (seed, position, token) and of nothing else.

    logits (B, V); seed (B,) int64; position (B,) of the drawn token in its context, int64
    -> scores (B, K) float64, whose arg max is the sample; log-probabilities (B, K) under the whole softmax at this
    temperature; tokens (B, K). Temperature 0 is greedy; top_k 0 and top_p 1 cut nothing.
    """
    width = min((top_k or logits.shape[-1]) if temperature else 2, logits.shape[-1])
    if fused(logits.device) and width <= 64:
        top, tokens, logsum = kernels.top_tokens(logits, width, temperature or 1.0)
    else:
        logits = logits.float() / (temperature or 1.0)  # (B, V)
        (top, tokens), logsum = logits.topk(width), logits.logsumexp(-1, keepdim=True)  # (B, K) sorted; (B, 1)
    logprobs = top - logsum  # (B, K)
    if not temperature:
        return top.double(), logprobs, tokens
    bits = mix(mix(mix(seed)[:, None] + position[:, None]) + tokens)  # (B, K)
    uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52
    scores = top.double() - (-uniform.log()).log()  # (B, K)
    if top_p < 1.0:
        before = top.softmax(-1).cumsum(-1) - top.softmax(-1)  # probability of the better tokens
        scores = scores.masked_fill(before >= top_p, -torch.inf)
    return scores, logprobs, tokens


def draw(logits, seed, position, temperature: float, top_k: int, top_p: float):
    """One token a row from softmax(logits / temperature) cut to top-k, then to top-p -> tokens (B,), their natural-log
    probabilities (B,). A sample does not depend on what shares its batch."""
    scores, logprobs, tokens = perturbed(logits, seed, position, temperature, top_k, top_p)
    pick = scores.argmax(-1, keepdim=True)  # (B, 1)
    return tokens.gather(1, pick)[:, 0], logprobs.gather(1, pick)[:, 0]


class Draw(LogitsProcessor):
    """`draw` inside generate(do_sample=False): leaves only the drawn token, and keeps its log-probability."""

    def __init__(self, seeds, padding, temperature, top_k, top_p):
        self.seeds, self.padding = seeds, padding  # (B,), (B,)
        self.settings = temperature, top_k, top_p
        self.logprobs: list[torch.Tensor] = []  # one (B,) a step

    def __call__(self, input_ids, scores):
        token, logprob = draw(scores, self.seeds, input_ids.shape[1] - self.padding, *self.settings)
        self.logprobs.append(logprob)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


def finish(ids: Sequence[int], max_tokens: int, eos_ids: Sequence[int]) -> tuple[int, str]:
    """How many of these ids belong to the reply, by the first end token, never by the padding's value."""
    for n, token in enumerate(ids[:max_tokens], start=1):
        if token in eos_ids:
            return n, "stop"
    return min(len(ids), max_tokens), "length"


def left_padded(contexts, device):
    """-> ids (B, T), attention mask (B, T), padding (B,)."""
    width = max(map(len, contexts))
    padding = torch.tensor([width - len(c) for c in contexts], device=device)  # (B,)
    ids = torch.tensor([[0] * (width - len(c)) + list(c) for c in contexts], device=device)  # (B, T)
    mask = (torch.arange(width, device=device) >= padding[:, None]).long()  # (B, T)
    return ids, mask, padding


@torch.no_grad()
def sample_plain(model, requests, eos_ids, temperature, top_k, top_p, batch_tokens=65536) -> list[Sample]:
    """Hugging Face generate, row by row of left-padded batches; samples come back in the order of the requests."""
    samples: list[Sample | None] = [None] * len(requests)
    for batch in batches_by_length(requests, batch_tokens):
        rows = [requests[i] for i in batch]
        ids, mask, padding = left_padded([r.context for r in rows], model.device)
        seeds = torch.tensor([r.seed for r in rows], device=model.device)
        processor = Draw(seeds, padding, temperature, top_k, top_p)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(r.max_tokens for r in rows),
            do_sample=False,  # the processor draws; argmax takes what it left
            logits_processor=LogitsProcessorList([processor]),
            eos_token_id=list(eos_ids),
            pad_token_id=0,
        )[:, ids.shape[1] :].tolist()  # (B, sampled)
        logprobs = torch.stack(processor.logprobs, 1).tolist()  # (B, sampled)
        for i, request, new, logprob in zip(batch, rows, out, logprobs, strict=True):
            n, why = finish(new, request.max_tokens, eos_ids)
            samples[i] = Sample(new[:n], logprob[:n], why)
    return samples


def converse_plain(model, requests, answer, eos_ids, **settings) -> None:
    """Replies to all requests, then to all that `answer` asks next, until it asks nothing."""
    while requests:
        samples = sample_plain(model, [request for _, request in requests], eos_ids, **settings)
        requests = answer([(key, sample) for (key, _), sample in zip(requests, samples, strict=True)])


def batches_by_length(requests, batch_tokens: int) -> list[list[int]]:
    """Indices of requests of similar length, so many a batch that context and reply tokens stay under the budget."""
    batches, widest = [], 0
    for i in sorted(range(len(requests)), key=lambda i: len(requests[i].context)):
        width = len(requests[i].context) + requests[i].max_tokens
        if batches and (len(batches[-1]) + 1) * max(widest, width) <= batch_tokens:
            batches[-1].append(i)
            widest = max(widest, width)
        else:
            batches.append([i])
            widest = width
    return batches
