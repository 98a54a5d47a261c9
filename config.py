"""Every setting of a run: the paper's Table 1, the presets, and how the command line changes them."""

import argparse
import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import get_type_hints

DOMAINS = {"chess": "domains.chess_puzzles"}
METHODS = ("whale", "weight-only", "harness-only", "stagewise", "fst")
PROPOSERS = ("catalogue",)
FLAGS = ("domain", "method", "adaptive", "preset", "model", "proposer", "puzzles", "seed", "cycles", "lora")


@dataclass(frozen=True)
class Config:
    """Every setting of a run, saved verbatim. Names are the paper's symbols; E and its kin are in epochs."""

    domain: str
    method: str = "whale"
    adaptive: bool = False
    preset: str = "smoke"
    model: str = "smollm2-135m"
    proposer: str = "catalogue"
    marks: bool = True  # whether the catalogue may use the marks of the SAN (+, #, x)
    puzzles: str = ""  # a Lichess file; empty: the built-in puzzles
    themes: str = ""  # comma-separated, any of them
    moves: int = 9  # longest solution, in the solver's moves
    max_legal: int = 0  # most legal moves of the first position; 0: any
    min_rating: int = 0  # 0: any
    max_rating: int = 0  # 0: any
    harness: str = ""  # h_0: a file; empty: the domain's
    seed: int = 0
    n_weight: int = 16384  # N = |D_weight| at most
    n_harness: int = 256  # |D_harness|
    n_test: int = 256  # |D_test|
    cycles: int = 6
    E: Fraction = Fraction("0.6")  # weight-update epochs per cycle
    I: int = 6  # harness-search iterations per cycle  # noqa: E741
    E_total: Fraction = Fraction(4)  # weight-only and stagewise
    I_total: int = 40  # harness-only and stagewise
    M: int = 3  # candidates per iteration
    B: int = 256  # |B_s|, prompts per rollout step
    G: int = 8  # trajectories per prompt
    minibatch: int = 64  # |M| of Eq. 2, in trajectories
    lr: float = 1e-7
    max_norm: float = 1.0
    W: Fraction = Fraction("0.2")  # averaging window of the training reward, in epochs
    T_min: Fraction = Fraction("0.2")
    P_w: Fraction = Fraction("0.2")
    J_min: int = 6
    P_h: int = 2
    test_samples: int = 8  # mean@8
    eval_steps: int = 7  # test every so many rollout steps; 0: at phase ends alone
    eval_iterations: int = 0  # test the accepted harness every so many search iterations; 0: at phase ends alone
    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 1.0
    prompt_limit: int = 4096
    response_limit: int = 16384
    sampler: str = "slots"  # or plain: Hugging Face generate as it is
    micro_tokens: int = 16384  # padded tokens of one forward and backward pass
    lora: int = 0  # rank of the adapters that are trained instead of all weights; 0: all weights
    checkpoint_minutes: float = 5.0  # full states inside a weight phase; 0: after every rollout step


PRESETS = {
    # Table 1, Chess Puzzles
    "paper": {"model": "Qwen/Qwen3.5-4B", "checkpoint_minutes": 60.0},  # a full state of 4B is 48 GB
    # one GPU, SmolLM2: minutes instead of weeks
    "mini": dict(
        harness="small", moves=2, n_weight=4096, n_harness=128, B=64, lr=2e-5, cycles=4, E=Fraction(10 * 64, 4096), I=4,
        E_total=Fraction(40 * 64, 4096), I_total=16, W=Fraction(4 * 64, 4096), T_min=Fraction(4 * 64, 4096),
        P_w=Fraction(4 * 64, 4096), J_min=4, test_samples=4, eval_steps=5, prompt_limit=1536, response_limit=256,
        minibatch=32,
    ),
    # two cores and a few minutes: one cycle, positions with few legal moves
    "smoke": dict(
        harness="small", moves=1, max_legal=8, n_weight=40, n_harness=24, n_test=16, B=8, G=4, minibatch=8, lr=5e-5,
        cycles=1, E=Fraction("0.6"), I=5, E_total=Fraction("0.6"), I_total=5, W=Fraction("0.4"), T_min=Fraction("0.4"),
        J_min=6, P_h=2, test_samples=2, eval_steps=0, prompt_limit=1024, response_limit=64, micro_tokens=2048,
    ),
}  # fmt: skip


def build_config(args: argparse.Namespace) -> Config:
    """The preset, then the settings with a flag of their own, then --set for others. Raises ValueError in one line."""
    given = chosen(args)
    cfg = Config(**{"domain": "chess", **PRESETS[given.get("preset", "smoke")], **given})
    validate(cfg)
    return cfg


def chosen(args: argparse.Namespace) -> dict:
    """The settings that the command line gives, those with a flag of their own and those of --set."""
    given = {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    for flag, known in (("domain", DOMAINS), ("method", METHODS), ("preset", PRESETS), ("proposer", PROPOSERS)):
        if flag in given and given[flag] not in known:
            raise ValueError(f"--{flag}: expected one of {', '.join(known)}, found {given[flag]!r}")
    types = {key: kind for key, kind in get_type_hints(Config).items() if key not in FLAGS}
    for item in args.set:
        key, found, value = item.partition("=")
        if key in FLAGS:
            raise ValueError(f"--set {key}: it has a flag of its own, use --{key}")
        if not found or key not in types:
            raise ValueError(f"--set: expected key=value with a key of {', '.join(types)}, found {item!r}")
        given[key] = parse(key, value, types[key])
    return given


def parse(key: str, value: str, kind: type):
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if kind is Fraction and "e" in value.lower():  # 1e999999999 would be worked out to the last digit
            raise ValueError
        return kind(value)
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"--set {key}: expected a value of type {kind.__name__}, found {value!r}") from error


def validate(cfg: Config) -> None:
    may_be_zero = {"seed", "eval_steps", "eval_iterations", "temperature", "top_k", "max_legal", "min_rating",
                   "max_rating", "I", "I_total", "marks", "adaptive", "lora", "checkpoint_minutes"}  # fmt: skip
    most = {"seed": 2**63 - 1, "lr": 1, "top_p": 1, "prompt_limit": 1 << 20, "response_limit": 1 << 20}
    for f in fields(cfg):
        value, flag = getattr(cfg, f.name), f"--{f.name}" if f.name in FLAGS else f"--set {f.name}"
        if not isinstance(value, int | float | Fraction):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{flag}: expected a finite number, found {value}")
        if not (value > 0 or value == 0 and f.name in may_be_zero):
            least = "of at least" if f.name in may_be_zero else "above"
            raise ValueError(f"{flag}: expected a number {least} 0, found {value}")
        if value > most.get(f.name, 1_000_000):
            raise ValueError(f"{flag}: expected a number of at most {most.get(f.name, 1_000_000)}, found {value}")
    if cfg.B * cfg.G > 10_000_000:
        raise ValueError(f"--set B, --set G: expected B * G of at most 10000000, found {cfg.B * cfg.G}")
    if 0 < cfg.temperature < 1e-3:  # logits over 1e-320 are not finite
        raise ValueError(f"--set temperature: expected 0 or a number of at least 0.001, found {cfg.temperature}")
    if cfg.sampler not in ("slots", "plain"):
        raise ValueError(f"--set sampler: expected slots or plain, found {cfg.sampler!r}")


def config_of(stored: dict, given: dict) -> Config:
    """The config of a run folder, back from its JSON; what the command line gives beside --resume must equal it."""
    types = get_type_hints(Config)
    if stored.keys() != types.keys():
        differs = ", ".join(sorted(stored.keys() ^ types.keys()))
        raise ValueError(f"expected a run of this version, found one whose settings differ in {differs}")
    for key, value in stored.items():
        if type(value) is not (str if types[key] is Fraction else types[key]):
            raise ValueError(f"expected {key} of type {types[key].__name__} in config.json, found {value!r}")
    known = {key: parse(key, value, Fraction) if types[key] is Fraction else value for key, value in stored.items()}
    if changed := [f"{key} is {known[key]}, not {value}" for key, value in given.items() if known[key] != value]:
        raise ValueError(f"--resume: expected the settings that the run began with: {'; '.join(changed)}")
    return Config(**known)
