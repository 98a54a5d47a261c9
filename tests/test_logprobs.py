"""log p_theta at the sampled positions: exact, however little memory there is."""

import math

import pytest
import torch
from test_rsft import GradientKeeper, accepted
from transformers import Gemma2Config, Gemma2ForCausalLM

import head
import model
from model import Policy, Row
from rsft import ascend

ROWS = [
    Row((5, 6, 7, 8, 9, 10, 11), (False, False, True, True, False, True, True)),  # two turns
    Row((12, 13, 14), (False, True, True)),
    Row((15, 16, 17, 18), (False, False, False, True)),
]


def full(policy, row: Row) -> torch.Tensor:
    """The same from the model's own logits of one row, without padding, chunks or a head applied by hand."""
    ids = torch.tensor([row.ids])
    logp = policy.model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    return logp[torch.tensor(row.mask[1:])]


def gradient_of(policy, value: torch.Tensor) -> torch.Tensor:
    policy.model.zero_grad()
    value.sum().backward()
    return torch.cat([weight.grad.flatten() for weight in policy.trained().values()])


@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_value_and_gradient_are_those_of_the_full_computation(tiny, monkeypatch, architecture):
    policy = Policy.load(str(tiny(architecture)))
    monkeypatch.setattr(head, "HEAD_BYTES", 2 * 4 * policy.model.config.vocab_size)  # chunks of two positions
    expected, found = torch.cat([full(policy, row) for row in ROWS]), policy.logprobs(ROWS)
    assert (found - expected).abs().max() < 1e-5
    expected, found = gradient_of(policy, expected), gradient_of(policy, found)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_the_chunk_is_bounded_in_bytes_whatever_the_vocabulary():
    assert head.positions_at_once(248_320) == 270
    assert head.positions_at_once(49_152) == 1365
    assert head.positions_at_once(10**9) == 1


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tiny, tmp_path):
    tokenizer = Policy.load(str(tiny())).tokenizer
    config = Gemma2Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                          num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                          final_logit_softcapping=30.0)  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gemma2 changes them .*final_logit_softcapping") as error:
        Policy.load(str(tmp_path))
    assert "\n" not in str(error.value)


class FullGpu:
    """Stands where `logprobs` does: the calls of these numbers find no memory."""

    def __init__(self, policy, failing):
        self.inner, self.failing, self.calls, self.sizes = policy.logprobs, failing, 0, []
        policy.logprobs = self

    def __call__(self, rows):
        self.calls += 1
        self.sizes.append(len(rows))
        value = self.inner(rows)
        if self.calls in self.failing:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return value


@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_out_of_memory_changes_neither_value_nor_gradient(tiny, capsys, architecture):
    policy = Policy.load(str(tiny(architecture)))
    (expected,) = ascend(policy, GradientKeeper(policy), accepted(9), 64, 36, 1e9, seed=0)
    gradient = GradientKeeper.kept
    gpu = FullGpu(policy, {2, 4})  # each time after a micro-batch whose gradient was there already
    (found,) = ascend(policy, GradientKeeper(policy), accepted(9), 64, 36, 1e9, seed=0)
    assert (expected.checkpointing, expected.micro_tokens) == (False, 36)
    assert (found.checkpointing, found.micro_tokens) == (True, 15)  # half of the 30 of the batch that failed last
    assert found.objective == pytest.approx(expected.objective, rel=1e-6)
    assert (GradientKeeper.kept - gradient).abs().max() < 1e-6 * gradient.norm()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "checkpointed" in said[0] and "at most" in said[1]
    calls = gpu.calls
    ascend(policy, GradientKeeper(policy), accepted(9), 64, 36, 1e9, seed=0)  # what was learned stays
    assert max(gpu.sizes[calls:]) < max(gpu.sizes[:calls]) and not capsys.readouterr().err


def test_a_row_that_never_fits_is_an_error_and_not_skipped(tiny):
    policy = Policy.load(str(tiny()))
    before = policy.weights()
    FullGpu(policy, range(100))
    with pytest.raises(MemoryError, match="one row of 7 tokens does not fit"):
        ascend(policy, torch.optim.AdamW(policy.model.parameters()), accepted(9), 64, math.inf, 1.0, seed=0)
    assert all(torch.equal(before[name], weight) for name, weight in policy.weights().items())


def test_rotary_frequencies_stay_fp32_when_the_weights_are_cast(tiny):
    policy = Policy.load(str(tiny()))
    model.to_bf16(policy.model)
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in policy.model.buffers()} == {torch.float32}
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
