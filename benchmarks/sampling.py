"""Useful tokens per second of every way to sample: python benchmarks/sampling.py --shape smollm2

One ragged workload: 32 prompts of 512 tokens, 8 replies each, lengths lognormal (mean about 154, at most 512), random
weights, bf16 on a GPU. Plain generate goes on until its longest reply is done; a token is useful if its reply wanted
it. Every side runs in full, in turn, `--repeats` times after one warm-up; the table gives medians. `--profile` adds
where a decode step's time goes.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from sampler import Request
from slots import SlotSampler

CUDA = torch.cuda.is_available()
SHAPES = {
    "smollm2": (LlamaForCausalLM, LlamaConfig, dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192)),
    "qwen3.5-2b": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, vocab_size=248320,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6)),
    "tiny": (LlamaForCausalLM, LlamaConfig, dict(
        hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=500, max_position_embeddings=8192)),
}  # fmt: skip


def build(shape: str):
    kind, config, sizes = SHAPES[shape]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    with torch.device("cuda" if CUDA else "cpu"):
        model = kind(config(**sizes, tie_word_embeddings=True)).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def workload(vocabulary: int, prompts: int, samples: int, prompt: int, longest: int):
    """-> contexts, wanted lengths; one reply has the longest length."""
    rng = random.Random(0)
    contexts = [tuple(rng.randrange(vocabulary) for _ in range(prompt)) for _ in range(prompts)]
    n = prompts * samples
    wanted = [max(4, min(longest, int(longest / 5 * rng.lognormvariate(0, 1)))) for _ in range(n - 1)] + [longest]
    return [contexts[i // samples] for i in range(n)], wanted


def plain(model, contexts, wanted):
    ids = torch.tensor(contexts, device=model.device)
    settings = dict(do_sample=True, temperature=1.0, top_k=20, top_p=1.0, max_new_tokens=max(wanted))

    def go():
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    return go


def slots(model, contexts, wanted):
    sampler = SlotSampler(model, [-1], 1.0, 20, 1.0, len(contexts), len(contexts[0]) + max(wanted))
    requests = [(i, Request(context, 100 + i, n)) for i, (context, n) in enumerate(zip(contexts, wanted, strict=True))]

    def go():
        found = {}
        sampler.converse(requests, lambda ended: found.update(ended) or [])
        assert [len(found[i].ids) for i in range(len(wanted))] == wanted

    go.sampler = sampler
    return go


def seconds(go) -> float:
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    go()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def profile(sampler, b: int) -> None:
    """The kernels of one decode step of b slots at full length."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    s = sampler.positions
    sampler.decoding(lambda: sampler._run(b, s))
    took = seconds(lambda: sampler.decoding(lambda: [sampler._run(b, s) for _ in range(4)])) / 4 / sampler.chunk
    print(f"decode step of {b} slots, {s} positions: {1000 * took:.2f} ms")
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        sampler.decoding(lambda: sampler._run(b, s))
        torch.cuda.synchronize()
    n = sampler.chunk
    kernels = sorted(((e.self_device_time_total / n / 1000, e.count // n, e.key) for e in trace.key_averages()),
                     reverse=True)  # fmt: skip
    for ms, count, name in kernels[:12]:
        print(f"    {ms:7.3f} ms x{count:4d} {name[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2" if CUDA else "tiny")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", default="plain,slots")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    model = build(args.shape)
    sizes = (32, 8, 512, 512) if CUDA else (4, 4, 48, 48)
    contexts, wanted = workload(model.config.vocab_size, *sizes)
    useful = sum(wanted)
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, torch {torch.__version__}, {args.shape} shape, "
          f"{model.dtype}: {len(wanted)} replies, {useful} useful tokens, longest {max(wanted)}")  # fmt: skip
    makers = {"plain": plain, "slots": slots}
    sides, first = {}, {}
    for name in args.sides.split(","):
        sides[name] = makers[name](model, contexts, wanted)
        first[name] = seconds(sides[name]) if name != "plain" else seconds(plain(model, contexts, [2]))
        print(f"{name}: first call {first[name]:.1f} s", flush=True)
    took = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, go in sides.items():
            took[name].append(seconds(go))
            print(f"{name}: {took[name][-1]:.2f} s", flush=True)
    print("\n| side | seconds, median (min-max) | useful tokens/s | ratio | first call |\n|---|---|---|---|---|")
    base = statistics.median(took[next(iter(sides))])
    for name, times in took.items():
        m = statistics.median(times)
        print(f"| {name} | {m:.2f} ({min(times):.2f}-{max(times):.2f}) | {useful / m:,.0f} | {base / m:.1f}x "
              f"| {first[name]:.1f} s |")  # fmt: skip
    if args.profile:
        for name, go in sides.items():
            if name != "plain":
                print(name)
                profile(go.sampler, len(wanted))


if __name__ == "__main__":
    main()
