"""Triton kernels for one decode step: B slots, one new token each.

A step of a small model is a thousand tiny kernels, each of which reads and writes all that it touches; here a layer is
about 14. They take bf16 or fp32, compute in fp32, round to the model's dtype where Hugging Face's code does, know no
gradient, and can be captured in a CUDA graph. A row's result depends on that row alone, never on the others' number or
lengths. Tensors are contiguous in their last dimension; head sizes are powers of two.

`fused(model)` puts them into a Hugging Face model; `write` and `decode_attention` are for a cache and an attention
function that know each row's position.
"""

import sys
from contextlib import contextmanager
from functools import wraps

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

CHUNK = 512  # positions of a row that one program attends to: fixed, so that a row is always split at the same places


@triton.jit
def _stored(x, pointer):
    """x as it reads back after being stored there: intermediate results are rounded as Hugging Face's tensors are."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


# Normalisation, activation, rotation -------------------------------------------------------------------------------


@triton.jit
def _rms_norm(x, residual, added, weight, out, x_row, eps, N: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
              ZERO_CENTRED: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    value = tl.load(x + row * x_row + i, mask=i < N, other=0.0).to(tl.float32)  # (N,)
    if ADD:
        value = _stored(value + tl.load(residual + row * N + i, mask=i < N, other=0.0).to(tl.float32), out)
        tl.store(added + row * N + i, value, mask=i < N)
    value *= tl.rsqrt(tl.sum(value * value) / N + eps)
    scale = tl.load(weight + i, mask=i < N, other=0.0).to(tl.float32)
    value = value * (1 + scale) if ZERO_CENTRED else _stored(value, out) * scale
    tl.store(out + row * N + i, value, mask=i < N)


def rms_norm(x, weight, eps, zero_centred=False, residual=None):
    """x (..., N) -> x / rms(x) * weight, or * (1 + weight) if zero-centred. With a residual (..., N): of x + residual,
    and that sum -> (normalised, sum)."""
    N, out = x.shape[-1], x.new_empty(x.shape)
    rows = x.reshape(-1, N)  # (rows, N) without a copy, also for every other half of a row
    args = (rows, out, out) if residual is None else (rows, residual.contiguous(), x.new_empty(x.shape))
    _rms_norm[(len(rows),)](*args, weight, out, rows.stride(0), eps, N, next_power_of_2(N), residual is not None,
                            zero_centred)  # fmt: skip
    return out if residual is None else (out, args[2])


@triton.jit
def _silu_mul(gate, up, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)
    y = tl.load(up + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, _stored(x * tl.sigmoid(x), out) * y, mask=i < n)


def silu_mul(gate, up):
    """silu(gate) * up, both contiguous and of one shape."""
    out = torch.empty_like(gate)
    _silu_mul[(triton.cdiv(out.numel(), 1024),)](gate, up, out, out.numel(), BLOCK=1024)
    return out


@triton.jit
def _rotate(x, cos, sin, out, x_row, x_head, cos_row, H: tl.constexpr, PADDED_H: tl.constexpr, D: tl.constexpr,
            R: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, PADDED_H)[:, None], tl.arange(0, D)[None, :]
    lower, at = d < R // 2, x + row * x_row + h * x_head
    value = tl.load(at + d, mask=h < H, other=0.0).to(tl.float32)  # (H, D)
    partner = tl.load(at + tl.where(lower, d + R // 2, d - R // 2), mask=(h < H) & (d < R), other=0.0).to(tl.float32)
    c = tl.load(cos + row * cos_row + d, mask=d < R, other=1.0).to(tl.float32)
    s = tl.load(sin + row * cos_row + d, mask=d < R, other=0.0).to(tl.float32)
    turned = _stored(value * c, out) + _stored(tl.where(lower, -partner, partner) * s, out)
    tl.store(out + (row * H + h) * D + d, turned, mask=h < H)


@triton.jit
def _rotary(q, k, cos, sin, q_out, k_out, q_row, q_head, k_row, k_head, cos_row, HQ: tl.constexpr, HK: tl.constexpr,
            PADDED_HQ: tl.constexpr, PADDED_HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr):  # fmt: skip
    _rotate(q, cos, sin, q_out, q_row, q_head, cos_row, HQ, PADDED_HQ, D, R)
    _rotate(k, cos, sin, k_out, k_row, k_head, cos_row, HK, PADDED_HK, D, R)


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    """apply_rotary_pos_emb: q (B, Hq, 1, D), k (B, Hk, 1, D), of which cos, sin (B or 1, 1, R) turn R dimensions."""
    (B, HQ, _, D), HK, R = q.shape, k.shape[1], cos.shape[-1]
    q_out, k_out, cos, sin = q.new_empty(q.shape), k.new_empty(k.shape), cos.expand(B, 1, R), sin.expand(B, 1, R)
    _rotary[(B,)](q, k, cos, sin, q_out, k_out, *q.stride()[:2], *k.stride()[:2], cos.stride(0), HQ, HK,
                  next_power_of_2(HQ), next_power_of_2(HK), D, R, enable_fp_fusion=False)  # fmt: skip
    return q_out, k_out


# Attention ---------------------------------------------------------------------------------------------------------


@triton.jit
def _write(keys, values, k, v, position, row_stride, head_stride, place_stride, k_row, k_head, v_row, v_head,
           position_row, H: tl.constexpr, PADDED_H: tl.constexpr, D: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, PADDED_H)[:, None], tl.arange(0, D)[None, :]
    place = tl.load(position + row * position_row).to(tl.int64)
    to = row * row_stride + h.to(tl.int64) * head_stride + place * place_stride + d
    tl.store(keys + to, tl.load(k + row * k_row + h * k_head + d, mask=h < H), mask=h < H)
    tl.store(values + to, tl.load(v + row * v_row + h * v_head + d, mask=h < H), mask=h < H)


def write(keys, values, k, v, position):
    """Put k, v (B, H, 1, D) of the newest tokens into keys, values (B, H, S, D), in place, at position (B, 1)."""
    assert keys.stride() == values.stride(), "keys and values are laid out alike"
    B, H, _, D = k.shape
    _write[(B,)](keys, values, k, v, position, *keys.stride()[:3], *k.stride()[:2], *v.stride()[:2],
                 position.stride(0), H, next_power_of_2(H), D)  # fmt: skip


@triton.jit
def _attend(query, keys, values, position, out, logsum, scale, query_row, query_head, row_stride, head_stride,
            place_stride, position_row, HQ: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr,
            D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    row, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(position + row * position_row).to(tl.int32) + 1
    first = chunk * CHUNK
    if first < length:
        stop = tl.minimum(first + CHUNK, length)
        g, d, n = tl.arange(0, PADDED_GROUP), tl.arange(0, D), tl.arange(0, BLOCK)
        group = head * GROUP + g  # these query heads share a key head
        q = tl.load(query + row * query_row + group[:, None] * query_head + d[None, :], mask=g[:, None] < GROUP,
                    other=0.0)  # (G, D)  # fmt: skip
        heads = row * row_stride + head.to(tl.int64) * head_stride
        best = tl.full((PADDED_GROUP,), -float("inf"), tl.float32)
        total = tl.zeros((PADDED_GROUP,), tl.float32)
        mixed = tl.zeros((PADDED_GROUP, D), tl.float32)
        for start in range(first, stop, BLOCK):
            place = start + n
            seen = place < stop
            at = heads + place[:, None] * place_stride + d[None, :]
            k = tl.load(keys + at, mask=seen[:, None], other=0.0)  # (BLOCK, D)
            v = tl.load(values + at, mask=seen[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (G, BLOCK)
            scores = tl.where(seen[None, :], scores, -float("inf"))
            now = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - now[:, None])
            shrink = tl.exp(best - now)
            total = total * shrink + tl.sum(weights, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            best = now
        to = (row * HQ + group) * tl.num_programs(2) + chunk
        tl.store(out + to[:, None] * D + d[None, :], mixed / total[:, None], mask=g[:, None] < GROUP)
        tl.store(logsum + to, best + tl.log(total), mask=g < GROUP)


@triton.jit
def _combine(parts, logsum, position, out, position_row, chunks, HQ: tl.constexpr, D: tl.constexpr,
             CHUNK: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D)
    used = tl.load(position + row * position_row).to(tl.int32) // CHUNK + 1
    at = (row * HQ + head) * chunks
    best, total, mixed = -float("inf"), 0.0, tl.zeros((D,), tl.float32)
    for chunk in range(0, used):  # in order: a sum over padding would depend on how long the longest row is
        part = tl.load(logsum + at + chunk)
        now = tl.maximum(best, part)
        shrink, weight = tl.exp(best - now), tl.exp(part - now)
        total = total * shrink + weight
        mixed = mixed * shrink + weight * tl.load(parts + (at + chunk) * D + d)
        best = now
    tl.store(out + (row * HQ + head) * D + d, mixed / total)


def decode_attention(query, keys, values, position, scale=None):
    """Row b attends to positions 0 .. position[b]; what lies behind them is not read. query (B, Hq, 1, D), keys and
    values (B, Hk, S, D), position (B,) -> (B, 1, Hq, D). Long rows are split over programs, then put together."""
    assert keys.stride() == values.stride(), "keys and values are laid out alike"
    (B, HQ, _, D), (HK, S) = query.shape, keys.shape[1:3]
    chunks, scale = triton.cdiv(S, CHUNK), D**-0.5 if scale is None else scale
    parts = query.new_empty(B, HQ, chunks, D, dtype=query.dtype if chunks == 1 else torch.float32)
    logsum = query.new_empty(B, HQ, chunks, dtype=torch.float32)
    block = max(16, min(128, 16384 // (D * keys.element_size())))  # 16 KB of keys and of values at a time
    # 16 rows are the least that a tensor core multiplies
    _attend[(B, HK, chunks)](query, keys, values, position, parts, logsum, scale, *query.stride()[:2],
                             *keys.stride()[:3], position.stride(0), HQ, HQ // HK, max(16, next_power_of_2(HQ // HK)),
                             D, block, CHUNK, num_stages=2)  # fmt: skip
    if chunks == 1:
        return parts.view(B, 1, HQ, D)
    out = query.new_empty(B, 1, HQ, D)
    _combine[(B, HQ)](parts, logsum, position, out, position.stride(0), chunks, HQ, D, CHUNK)
    return out


# Linear attention --------------------------------------------------------------------------------------------------


@triton.jit
def _conv_step(x, state, weight, bias, out, x_row, state_row, C, K: tl.constexpr, BLOCK: tl.constexpr,
               BIAS: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c, k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K)
    at, inside = c[:, None] * K + k[None, :], c[:, None] < C
    newest = tl.load(x + row * x_row + c, mask=c < C, other=0.0)
    window = tl.load(state + row * state_row + at + 1, mask=inside & (k[None, :] < K - 1), other=0.0)
    window = tl.where(k[None, :] < K - 1, window, newest[:, None].to(window.dtype))  # (BLOCK, K)
    tl.debug_barrier()  # the shifted window overwrites what another thread may still have to load
    tl.store(state + row * state_row + at, window, mask=inside)
    taps = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.sum(window.to(tl.float32) * taps, 1)
    if BIAS:
        y += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    y = _stored(y, out)
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(out + row * C + c, y, mask=c < C)


def conv_step(hidden_states, conv_state, weight, bias=None, activation=None):
    """causal_conv1d_update for one token: hidden_states (B, C, 1), weight (C, K); conv_state (B, C, K) moves on in
    place -> (B, C, 1)."""
    (B, C, _), K = hidden_states.shape, weight.shape[1]
    assert conv_state.stride()[1:] == (K, 1) and hidden_states.stride(1) == 1 and activation in (None, "silu")
    out = hidden_states.new_empty(B, C, 1)
    _conv_step[(B, triton.cdiv(C, 256))](hidden_states, conv_state, weight, out if bias is None else bias, out,
                                         hidden_states.stride(0), conv_state.stride(0), C, K, 256, bias is not None,
                                         activation == "silu")  # fmt: skip
    return out


@triton.jit
def _delta_step(qkv, z, a, b, A_log, dt_bias, weight, state, out, state_row, eps, HK: tl.constexpr,
                HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j, mine = tl.arange(0, DK), tl.arange(0, DV), row * HV + head
    qkv += row * (2 * HK * DK + HV * DV)
    of_head = qkv + head // (HV // HK) * DK + i
    q, k = tl.load(of_head).to(tl.float32), tl.load(of_head + HK * DK).to(tl.float32)  # (DK,)
    v = tl.load(qkv + 2 * HK * DK + head * DV + j).to(tl.float32)  # (DV,)
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) / tl.sqrt(DK * 1.0)
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    t = tl.load(a + mine).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    softplus = tl.maximum(t, 0.0) + tl.log(1 + tl.exp(-tl.abs(t)))
    decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus)
    beta = _stored(tl.sigmoid(tl.load(b + mine).to(tl.float32)), out)

    at = state + row * state_row + head * DK * DV + i[:, None] * DV + j[None, :]
    memory = tl.load(at) * decay  # (DK, DV), in registers: read once and written once
    memory += k[:, None] * ((v - tl.sum(memory * k[:, None], 0)) * beta)[None, :]
    tl.store(at, memory)

    y = _stored(tl.sum(memory * q[:, None], 0), out)  # (DV,)
    y = _stored(y * tl.rsqrt(tl.sum(y * y) / DV + eps), out) * tl.load(weight + j).to(tl.float32)
    gate = tl.load(z + mine * DV + j).to(tl.float32)
    tl.store(out + mine * DV + j, _stored(y, out) * gate * tl.sigmoid(gate))


def delta_step(qkv, z, a, b, A_log, dt_bias, weight, eps, state):
    """One token of the gated delta rule and the gated norm after it; the state (B, Hv, Dk, Dv) fp32 changes in place.

    qkv (B, 1, Hk Dk + Hk Dk + Hv Dv) after the convolution; z (B, 1, Hv Dv); a, b (B, 1, Hv); weight (Dv,) of the norm
        S <- e^g S,  g = -exp(A_log) softplus(a + dt_bias)
        S <- S + k beta (v - S^T k)^T,  beta = sigmoid(b), k and q of length 1
        o = norm(S^T q / sqrt(Dk)) silu(z)                                       -> (B, 1, Hv Dv)
    """
    B, HV, DK, DV = state.shape
    HK = (qkv.shape[-1] - HV * DV) // (2 * DK)
    assert state.stride()[1:] == (DK * DV, DV, 1) and state.dtype == torch.float32
    out = torch.empty_like(z)
    _delta_step[(B, HV)](qkv, z, a, b, A_log, dt_bias, weight, state, out, state.stride(0), eps, HK, HV, DK,
                         DV)  # fmt: skip
    return out


# Drawing a token ---------------------------------------------------------------------------------------------------


@triton.jit
def _block_stats(logits, maxima, logsums, row_stride, V, blocks, scale, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCKS + tl.arange(0, BLOCKS)
    at = i[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + row * row_stride + at, mask=at < V, other=-float("inf")).to(tl.float32)  # (BLOCKS, WIDTH)
    best = tl.max(x, 1)
    tl.store(maxima + row * blocks + i, best, mask=i < blocks)
    top = tl.max(best, 0)
    total = tl.sum(tl.exp((x - top) * scale))
    tl.store(logsums + row * tl.num_programs(1) + part, top * scale + tl.log(total))


def top_tokens(logits, k, temperature):
    """The k best of logits / temperature, logits (B, V) -> values (B, k) fp32, sorted; tokens (B, k); log of the sum of
    exp over all of V (B, 1). The k best lie in the k blocks with the best maxima: a large vocabulary is read once, and
    only k blocks are sorted."""
    (B, V), width, at_once = logits.shape, 128, 16
    blocks, parts = triton.cdiv(V, width), triton.cdiv(V, width * at_once)
    maxima, logsums = (logits.new_empty(B, n, dtype=torch.float32) for n in (blocks, parts))
    _block_stats[(B, parts)](logits, maxima, logsums, logits.stride(0), V, blocks, 1 / temperature, at_once, width)
    best = maxima.topk(min(k, blocks)).indices  # (B, k)
    tokens = (best[:, :, None] * width + torch.arange(width, device=logits.device)).flatten(1)  # (B, k width)
    values = logits.gather(1, tokens.clamp(max=V - 1)).float().masked_fill(tokens >= V, -torch.inf)
    top, at = values.topk(k)
    return top / temperature, tokens.gather(1, at), logsums.logsumexp(-1, keepdim=True)


# Inside a Hugging Face model ---------------------------------------------------------------------------------------
# Each takes the arguments of the function that it stands in for, and returns None where that one must do it.


def norm_forward(norm, x, residual=None):
    if x.shape[1] == 1:
        zero_centred = type(norm).__name__ == "Qwen3_5RMSNorm"
        eps = norm.eps if zero_centred else norm.variance_epsilon
        return rms_norm(x, norm.weight, eps, zero_centred, residual)


def mlp_forward(mlp, x):
    if x.shape[1] == 1 and mlp.config.hidden_act == "silu":
        return mlp.down_proj(silu_mul(mlp.gate_proj(x), mlp.up_proj(x)))


def rotary_function(q, k, cos, sin, unsqueeze_dim=1):
    if q.shape[2] == 1 and unsqueeze_dim == 1:
        return rotary(q, k, cos, sin)


def layer_forward(layer, hidden_states, **inputs):
    """The residual stream of one token, hidden_states (B, 1, E), past the token mixer and the MLP."""
    net = getattr(layer, "linear_attn", None)
    if hidden_states.shape[1] != 1 or (net and not (state := recurrent_state(net, **inputs))):
        return None
    x = layer.input_layernorm(hidden_states)
    x = gated_delta_net(net, x, state) if net else layer.self_attn(hidden_states=x, **inputs)[0]
    x, hidden_states = norm_forward(layer.post_attention_layernorm, x, residual=hidden_states)
    return hidden_states + layer.mlp(x)


def recurrent_state(net, cache=None, past_key_values=None, attention_mask=None, **inputs):
    """The cache's layer, where it holds the tokens before this one."""
    cache = cache or past_key_values  # its name in transformers 5.24, in 5.17
    if cache is not None and attention_mask is None:
        layer = cache.layers[net.layer_idx]
        return layer if layer.has_previous_state[0] and not layer.record_past else None


def gated_delta_net(net, x, state):
    """Qwen3_5GatedDeltaNet of one token, x (B, 1, E); the cache's states change in place."""
    qkv = conv_step(net.in_proj_qkv(x).transpose(1, 2), state.conv_states[0], net.conv1d.weight.squeeze(1),
                    net.conv1d.bias, net.activation).transpose(1, 2)  # (B, 1, C)  # fmt: skip
    y = delta_step(qkv, net.in_proj_z(x), net.in_proj_a(x), net.in_proj_b(x), net.A_log, net.dt_bias, net.norm.weight,
                   net.norm.variance_epsilon, state.recurrent_states[0])  # fmt: skip
    return net.out_proj(y)


@contextmanager
def fused(model):
    """While open, a forward of one token a row runs these kernels in the classes of this model (llama, qwen2, qwen3,
    qwen3_5_text) where no gradient is asked for; all else goes where it went. Attention stays what it is."""
    swaps = [(sys.modules[type(model).__module__], "apply_rotary_pos_emb", rotary_function)]
    for kind in {type(module) for module in model.modules()}:
        for ending, decode in (("RMSNorm", norm_forward), ("MLP", mlp_forward), ("DecoderLayer", layer_forward)):
            if kind.__name__.endswith(ending):
                swaps.append((kind, "forward", decode))
    originals = [vars(owner)[name] for owner, name, _ in swaps]
    try:
        for (owner, name, decode), original in zip(swaps, originals, strict=True):
            setattr(owner, name, decode_or(decode, original))
        yield
    finally:
        for (owner, name, _), original in zip(swaps, originals, strict=True):
            setattr(owner, name, original)


def decode_or(decode, original):
    @wraps(original)
    def function(*args, **kwargs):
        result = None if torch.is_grad_enabled() else decode(*args, **kwargs)
        return original(*args, **kwargs) if result is None else result

    return function
