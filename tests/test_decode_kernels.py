"""The kernels of a decode step against Hugging Face's own functions: on the GPU if there is one, else interpreted."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from conftest import MODELS
from transformers import DynamicCache
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

pytest.importorskip("triton", reason="the kernels need triton: it comes with torch for CUDA, else pip install triton")

import decode_kernels as kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # triton's interpreter does not round to bf16 but cuts off
RUNNABLE = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
here = pytest.mark.skipif(not RUNNABLE, reason="runs in the subprocess of test_all_of_this_interpreted")


@pytest.mark.skipif(RUNNABLE, reason="the tests themselves run in this process")
def test_all_of_this_interpreted():
    """Triton is told to interpret before it is imported, and transformers imports it."""
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__], env=os.environ | {"TRITON_INTERPRET": "1"},
                         capture_output=True, text=True, timeout=300)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)


@pytest.fixture(autouse=True)
def exact():
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # of the convolution compared with
    with torch.no_grad():
        yield


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


def same(ours, reference, tolerance=1e-5):
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    if ours.dtype == HALF:  # the same rounding, but for a last bit of fp32 here and there
        assert (ours != reference).float().mean() < 0.01
        tolerance = 2**-7
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


@here
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms_round_where_hugging_face_does(dtype):
    heads = random(3, 1, 5, 2 * 24, dtype=dtype)[..., :24]  # Qwen3.5's query heads: every other half row
    for norm in (llama.LlamaRMSNorm(24, 1e-5), qwen.Qwen3_5RMSNorm(24, 1e-5)):
        norm.weight.data = random(24, dtype=dtype)
        norm.to(DEVICE)
        same(kernels.norm_forward(norm, heads), norm(heads))
        x, residual = random(3, 1, 24, dtype=dtype), random(3, 1, 24, dtype=dtype)
        ours, added = kernels.norm_forward(norm, x, residual)
        same(added, residual + x, 0)
        same(ours, norm(residual + x))


@here
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_silu_mul(dtype):
    gate, up = random(3, 1, 700, dtype=dtype), random(3, 1, 700, dtype=dtype)
    same(kernels.silu_mul(gate, up), torch.nn.functional.silu(gate) * up)


@here
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("module, turned", [(llama, 32), (qwen, 32), (qwen, 8)])
def test_rotary_of_nine_query_and_three_key_heads(module, turned, dtype):
    q, k = random(4, 1, 9, 32, dtype=dtype).transpose(1, 2), random(4, 1, 3, 64, dtype=dtype)[..., :32].transpose(1, 2)
    cos, sin = random(4, 1, turned, dtype=dtype), random(4, 1, turned, dtype=dtype)
    expected = module.apply_rotary_pos_emb(q, k, cos, sin)
    for ours, reference in zip(kernels.rotary(q, k, cos, sin), expected, strict=True):
        same(ours, reference)


@here
def test_write_touches_one_position_a_row():
    buffers = random(2, 6, 3, 40, 16)
    expected, position = buffers.clone(), torch.tensor([[0], [7], [29], [3]], device=DEVICE)
    k, v = random(4, 3, 1, 16), random(4, 1, 3, 16).transpose(1, 2)
    for row, place in enumerate(position[:, 0].tolist()):
        expected[0, row, :, place], expected[1, row, :, place] = k[row, :, 0], v[row, :, 0]
    kernels.write(buffers[0, :4, :, :30], buffers[1, :4, :, :30], k, v, position)
    assert torch.equal(buffers, expected)


@here
@pytest.mark.parametrize("heads, group, D", [(3, 3, 16), (2, 4, 32), (1, 1, 64)])
def test_attention_of_ragged_rows_of_strided_views(heads, group, D):
    position = torch.tensor([0, 63, 511, 512, 700], device=DEVICE)
    query = random(5, 1, heads * group, D).transpose(1, 2)
    keys, values = random(2, 8, heads, 900, D)
    for row, place in enumerate(position.tolist()):  # what lies behind a row is never read
        keys[row, :, place + 1 :], values[row, :, place + 1 :] = torch.nan, torch.nan
    ours = kernels.decode_attention(query, keys[:5, :, :800], values[:5, :, :800], position)
    for row, place in enumerate(position.tolist()):
        seen = [x[row : row + 1, :, : place + 1].repeat_interleave(group, 1) for x in (keys, values)]
        reference = torch.nn.functional.scaled_dot_product_attention(query[row : row + 1], *seen)
        same(ours[row : row + 1], reference.transpose(1, 2))
    # nor does a row depend on the rows and on the number of positions beside it
    alone = kernels.decode_attention(query[2:3], keys[2:3, :, :512], values[2:3, :, :512], position[2:3])
    assert torch.equal(alone[0], ours[2])


@here
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_moves_its_window(bias):
    states, weight = random(6, 300, 4), random(300, 4)
    expected, extra = states.clone(), random(300) if bias else None
    for _ in range(2):
        x = random(5, 1, 300).transpose(1, 2)
        ours = kernels.conv_step(x, states[:5], weight, extra, "silu")
        same(ours, qwen.causal_conv1d_update(x, expected[:5], weight, extra, "silu"))
    assert torch.equal(states, expected)


@here
@pytest.mark.parametrize("key_heads, value_heads", [(2, 4), (3, 3)])
def test_the_delta_rule_and_its_gated_norm(key_heads, value_heads):
    B, DK, DV = 3, 16, 32
    keys, width = key_heads * DK, value_heads * DV
    states, A_log, dt_bias = random(5, value_heads, DK, DV), random(value_heads), random(value_heads)
    norm = qwen.Qwen3_5RMSNormGated(DV, 1e-5).to(DEVICE)
    norm.weight.data = random(DV)
    expected = states.clone()
    for shift in (0.0, -12.0, 30.0):  # of the decay: the middle, nearly 1, nearly 0
        qkv, z = random(B, 1, 2 * keys + width), random(B, 1, width)
        a, b = random(B, 1, value_heads) + shift, random(B, 1, value_heads)
        q, k, v = qkv.split([keys, keys, width], -1)
        q, k = (x.view(B, 1, key_heads, DK).repeat_interleave(value_heads // key_heads, 2) for x in (q, k))
        g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
        y, state = qwen.torch_recurrent_gated_delta_rule(
            q, k, v.view(B, 1, value_heads, DV), g=g, beta=b.sigmoid(), initial_state=expected[:B],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        expected[:B] = state
        reference = norm(y.reshape(-1, DV), z.reshape(-1, DV)).view(B, 1, width)
        same(kernels.delta_step(qkv, z, a, b, A_log, dt_bias, norm.weight, 1e-5, states[:B]), reference)
        same(states, expected)


def tensors_of(cache):
    for layer in cache.layers:
        if isinstance(getattr(layer, "keys", None), torch.Tensor):
            yield from (layer.keys, layer.values)
        else:
            yield from (layer.conv_states[0], layer.recurrent_states[0])


@here
@pytest.mark.parametrize("V,dtype", [(5000, torch.float32), (5000, HALF), (130, torch.float32), (7, torch.float32)])
def test_the_best_tokens_are_those_of_a_full_sort(V, dtype):
    wide = random(3, 2 * V, dtype=dtype)[:, :V] * 3  # fp16 has ties: only their values are compared
    top, tokens, logsum = kernels.top_tokens(wide, min(20, V), 0.7)
    expected = wide.float() / 0.7
    same(top, expected.topk(min(20, V)).values)
    same(logsum, expected.logsumexp(-1, keepdim=True))
    same(expected.gather(1, tokens), top)
    assert all(len(set(row)) == len(row) for row in tokens.tolist())


@here
@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_a_fused_model_decodes_as_before_and_closes_without_a_trace(architecture):
    model = MODELS[architecture](64).to(DEVICE)
    for name, weight in model.named_parameters():  # norms whose weights are not all alike
        if "norm" in name:
            weight.add_(0.1 * torch.randn_like(weight))
    kinds = {type(module) for module in model.modules()}
    before = [(kind, dict(vars(kind))) for kind in kinds], dict(vars(sys.modules[type(model).__module__]))
    ids = torch.randint(0, 64, (3, 8), device=DEVICE)

    def run():
        """A prefill, then two steps that feed the drawn tokens."""
        cache, logits = DynamicCache(config=model.config), []
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        for fed in (ids[:, :6], ids[:, 6:7], ids[:, 7:]):
            logits.append(model(fed, **{name: cache}, use_cache=True).logits)
        return torch.cat(logits, 1), list(tensors_of(cache))

    calls = []
    reference, states = run()
    with kernels.fused(model), pytest.MonkeyPatch.context() as patch:
        for name in ("rms_norm", "silu_mul", "rotary", "conv_step", "delta_step"):
            kernel = getattr(kernels, name)
            patch.setattr(kernels, name, lambda *a, n=name, k=kernel, **kw: calls.append(n) or k(*a, **kw))
        logits, fused_states = run()
        one = model(ids[:, :1], use_cache=True).logits  # a context of one token has no state yet
    same(logits, reference, 1e-4)
    for ours, expected in zip(fused_states, states, strict=True):
        same(ours, expected, 1e-4)
    same(one, model(ids[:, :1]).logits, 1e-4)
    per_step = {name: sum(name == call for call in calls) / 2 for name in set(calls)}
    assert per_step["silu_mul"] >= model.config.num_hidden_layers
    assert ("delta_step" in per_step) == (architecture == "qwen3.5")
    assert [(kind, dict(vars(kind))) for kind in kinds] == before[0]
    assert dict(vars(sys.modules[type(model).__module__])) == before[1]
