"""One optimizer step of ours against TRL's SFTTrainer: python benchmarks/training.py --shape smollm2

The same rows, model (random weights), precision (fp32 weights, bf16 autocast on a GPU), activation checkpointing,
padded tokens of a micro-batch, and loss (mean over the completion tokens of the whole minibatch). Each side in turn:
one warm-up step, then the median of `--repeats`. TRL's clock runs from its step's first forward to after its optimizer,
without its collator; ours from trajectories to after the optimizer. The loss of the first step shows that both do the
same work. Needs `pip install trl datasets`.
"""

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from sampling import SHAPES
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

sys.path.insert(0, str(Path(__file__).parent.parent))
from data_types import StopReason, Trajectory, Turn
from model import Policy
from rsft import ascend

CUDA = torch.cuda.is_available()
LR = 1e-6
WORK = {  # rows, tokens of a row at least and at most, of which trained, rows of a pass, activation checkpointing
    "smollm2": (64, 800, 1000, 60, 16, False),
    "qwen3.5-2b": (4, 8192, 8192, 2000, 1, True),
    "tiny": (8, 40, 60, 10, 2, True),
}


def workload(shape: str, vocabulary: int) -> list[tuple[list[int], int]]:
    """-> (ids, how many of them at the end are trained) of each row."""
    rows, shortest, longest, trained, *_ = WORK[shape]
    rng = random.Random(0)
    return [([rng.randrange(vocabulary) for _ in range(rng.randint(shortest, longest))], trained) for _ in range(rows)]


def build(shape: str):
    kind, config, sizes = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = kind(config(**sizes, tie_word_embeddings=True))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Both sides ask for one; the rows are ids already."""
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def ours(shape: str, rows, steps: int, checkpointing: bool) -> tuple[list[float], float]:
    """-> seconds of each step, loss of the first. The bf16 copy that samples is left out: SFTTrainer has none."""
    policy = Policy(build(shape), tokenizer(), sampler="plain")
    policy.actor = policy.model
    if checkpointing:
        policy.checkpoint_activations()
    optimizer = torch.optim.AdamW(policy.trained().values(), lr=LR, weight_decay=0.0, fused=True)
    accepted = [
        Trajectory(str(i), "", 0, 0, 1, StopReason.DONE, (Turn(tuple(ids[:-n]), tuple(ids[-n:]), (), "", "stop"),))
        for i, (ids, n) in enumerate(rows)
    ]
    micro_tokens, took, losses = WORK[shape][4] * max(len(ids) for ids, _ in rows), [], []
    for _ in range(steps):
        start = now()
        (step,) = ascend(policy, optimizer, accepted, len(accepted), micro_tokens, 1.0, seed=0)
        took.append(now() - start)
        losses.append(-step.objective)
    if step.checkpointing != checkpointing or step.micro_tokens != micro_tokens:
        print(f"ours: ran out of memory and went on with checkpointing, at most {step.micro_tokens} tokens at once")
    return took, losses[0]


class Clock(TrainerCallback):
    def __init__(self):
        self.took, self.losses = [], []

    def on_step_begin(self, *args, **kwargs):
        self.start = now()

    def on_step_end(self, *args, **kwargs):
        self.took.append(now() - self.start)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses += [logs["loss"]] if "loss" in logs else []


def trl(shape: str, rows, steps: int, checkpointing: bool) -> tuple[list[float], float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    columns = {
        "input_ids": [ids for ids, _ in rows],
        "completion_mask": [[0] * (len(ids) - n) + [1] * n for ids, n in rows],
    }
    clock, per_pass = Clock(), WORK[shape][4]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=len(rows) // per_pass, gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False}, bf16=CUDA, use_cpu=not CUDA, learning_rate=LR,
            lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, max_length=None, packing=False,
            completion_only_loss=True, logging_steps=1, save_strategy="no", eval_strategy="no", report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            build(shape), config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer(),
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    return clock.took, clock.losses[0]


def measure(side, *work) -> tuple[list[float], float, float] | None:
    """-> seconds of each step, loss of the first, peak GiB; None if the side failed. Its memory is free afterwards."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    try:
        took, loss = side(*work)
        return took, loss, torch.cuda.max_memory_allocated() / 2**30 if CUDA else float("nan")
    except Exception as error:  # the other side is measured all the same
        print(f"{side.__name__} failed: {type(error).__name__}: {str(error)[:500]}", flush=True)
        return None
    finally:
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=WORK, default="smollm2" if CUDA else "tiny")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", default="ours,trl")
    parser.add_argument("--checkpointing", choices=("on", "off"), help="of activations; without it the shape's own")
    args = parser.parse_args()
    rows = workload(args.shape, SHAPES[args.shape][2]["vocab_size"])
    checkpointing = {"on": True, "off": False, None: WORK[args.shape][5]}[args.checkpointing]
    row_tokens, trained = sum(len(ids) for ids, _ in rows), sum(n for _, n in rows)
    print(f"{torch.cuda.get_device_name() if CUDA else 'CPU'}, torch {torch.__version__}, {args.shape} shape, "
          f"{len(rows)} rows, {row_tokens} tokens, {trained} trained, {WORK[args.shape][4]} rows a pass, activation "
          f"checkpointing {'on' if checkpointing else 'off'}", flush=True)  # fmt: skip
    found = {}
    for name in args.sides.split(","):
        found[name] = measure({"ours": ours, "trl": trl}[name], args.shape, rows, args.repeats + 1, checkpointing)
        print(f"{name}: {found[name] and [round(s, 3) for s in found[name][0]]} s", flush=True)
    print("\n| side | seconds a step, median (min-max) | row tokens/s | trained tokens/s | peak GiB | first loss |")
    print("|---|---|---|---|---|---|")
    for name, result in found.items():
        if result is None:
            print(f"| {name} | failed | | | | |")
            continue
        (_, *took), loss, peak = result
        m = statistics.median(took)
        print(f"| {name} | {m:.3f} ({min(took):.3f}-{max(took):.3f}) | {row_tokens / m:,.0f} | {trained / m:,.0f} "
              f"| {peak:.2f} | {loss:.5f} |")  # fmt: skip


if __name__ == "__main__":
    main()
