"""Weights on disk: always one that loads (pitfalls F7), and loaded as they were saved (F11)."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from model import Policy
from run_folder import read_whole

WRITER = """
import json, shutil, sys
from pathlib import Path
import numpy
from safetensors.numpy import save_file
sys.path.insert(0, sys.argv[2])
import journal
folder, n = Path(sys.argv[1]), 1 + max([int(path.name) for path in Path(sys.argv[1]).glob("?????")], default=0)
journal.drop_half_written(folder)
while True:
    half = folder / f"{n:05d}.half"
    half.mkdir()
    save_file({"theta": numpy.full(20_000_000, n, numpy.float32)}, half / "model.safetensors")  # 80 MB
    size = (half / "model.safetensors").stat().st_size
    (half / "state.json").write_text(json.dumps({"trained": n, "files": {"model.safetensors": size}}))
    journal.settle(half, folder / f"{n:05d}")
    for old in sorted(folder.glob("?????"))[:-2]:
        shutil.rmtree(old)
    n += 1
"""


def test_killed_while_it_saves_there_is_always_one_that_loads(tmp_path):
    rng, cut = random.Random(7), 0
    for kill in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(ROOT)])
        while kill == 0 and not list(tmp_path.glob("?????")):
            time.sleep(0.01)  # before the first one there is nothing to keep
        time.sleep(rng.uniform(0.5, 1.5))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        cut += bool(list(tmp_path.glob("*.half")))
        path = max(tmp_path.glob("?????"))  # the oldest may be half removed, the newest never
        about = read_whole(path)
        assert about, list(path.iterdir())
        assert (load_file(path / "model.safetensors")["theta"] == about["trained"]).all()
    print(f"{cut} of 6 kills left something half-written")


@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_tied_weights_come_back_tied_with_no_key_missing_or_left_over(tiny, tmp_path, architecture):
    policy = Policy.load(str(tiny(architecture)))
    with torch.no_grad():
        for weight in policy.trained().values():
            weight.add_(0.01)
    policy.save(tmp_path)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), found
    again, ids = Policy.load(str(tmp_path)), torch.tensor([[10, 11, 12, 13]])
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert all(torch.equal(weight, again.weights()[name]) for name, weight in policy.weights().items())
    with torch.no_grad():
        assert (again.model(ids).logits - policy.model(ids).logits).abs().max() <= 1e-6
    other = Policy.load(str(tiny(architecture)))
    other.restore(tmp_path)
    assert all(torch.equal(weight, other.weights()[name]) for name, weight in policy.weights().items())


@pytest.mark.parametrize("text_is_tied", [False, True])
def test_a_head_that_would_be_made_up_is_refused(tmp_path, text_is_tied):
    """A multimodal Qwen3.5 checkpoint whose embeddings are tied on top; its text config may not say so."""
    tok = tokenizer("qwen3.5-2b")
    text = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4,
                linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=len(tok),
                layer_types=["linear_attention"] * 3 + ["full_attention"],
                tie_word_embeddings=text_is_tied)  # fmt: skip
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    if text_is_tied:
        model = Policy.load(str(tmp_path)).model
        assert model.lm_head.weight is model.model.embed_tokens.weight
    else:
        with pytest.raises(ValueError, match="has no value for 1 weights, as lm_head.weight"):
            Policy.load(str(tmp_path))


def test_a_cut_weights_file_is_no_checkpoint(tiny, tmp_path):
    Policy.load(str(tiny())).save(tmp_path)
    file = tmp_path / "model.safetensors"
    (tmp_path / "state.json").write_text(json.dumps({"files": {file.name: file.stat().st_size}}))
    assert read_whole(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    assert read_whole(tmp_path) is None
    with pytest.raises(ValueError, match="--model: expected") as error:
        Policy.load(str(tmp_path))
    assert "\n" not in str(error.value)
