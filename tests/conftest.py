"""Tiny real models: random weights of the Llama and Qwen3.5 architectures, a byte-level BPE tokenizer, real templates.

templates/ holds the chat templates of Qwen3.5-2B and 4B as published by Qwen (Apache-2.0).
"""

import signal
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs pytest in the background has it ignored
ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>"]
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "smollm2": CHATML,
    "qwen3.5-2b": (ROOT / "tests/templates/qwen3_5_2b.jinja").read_text(),
    "qwen3.5-4b": (ROOT / "tests/templates/qwen3_5_4b.jinja").read_text(),
}


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello hello hello move legal moves FEN board assistant system user tool"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATES[template]
    return fast


def tiny_llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=8192,
                    tie_word_embeddings=True, initializer_range=0.2)
    ).eval()  # fmt: skip


def tiny_qwen(vocabulary: int) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4,
                          linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=vocabulary,
                          layer_types=["linear_attention"] * 3 + ["full_attention"], tie_word_embeddings=True,
                          initializer_range=0.1)
    ).eval()  # fmt: skip


MODELS = {"llama": tiny_llama, "qwen3.5": tiny_qwen}


def save_tiny(folder: Path, architecture: str = "llama", template: str = "smollm2") -> Path:
    """A folder that `--model` takes."""
    tok = tokenizer(template)
    MODELS[architecture](len(tok)).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Of an architecture and a template -> the folder of a tiny model, made once."""
    made = {}

    def make(architecture: str = "llama", template: str = "smollm2") -> Path:
        key = architecture, template
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp("tiny"), *key)
        return made[key]

    return make
