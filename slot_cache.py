"""What slots are made of, as a transformers cache: keys and values or recurrent states, and the attention on them.

`keys` are (slots, H, S, D). A decode step sees views of the first slots and positions and writes each newest token at
its own position; on a GPU with Triton that and the attention itself are kernels which read no padding.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from sampler import fused, kernels


def grouped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Decode: query heads that share a key head are several queries of it, so that keys and values are read once and
    never repeated in memory. query (B, Hq, 1, D), key and value (B, Hk, S, D), mask (B, 1, 1, S) True where seen, or
    for the kernel (B, 1, 1, 1): the last position that is seen."""
    if query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask.dtype == torch.long:
        return kernels.decode_attention(query, key, value, attention_mask[:, 0, 0, 0], scaling), None
    B, heads, _, D = query.shape
    grouped = query.reshape(B, key.shape[1], heads // key.shape[1], D)
    scores = torch.matmul(grouped, key.transpose(2, 3)).float() * (D**-0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1).to(value.dtype)  # (B, Hk, Hq / Hk, S)
    return torch.matmul(weights, value).reshape(B, 1, heads, D), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


class SlotLayer(StaticLayer):
    """Prefill: keys and values of one attention layer for the slots `rows`, each token written at its own position."""

    def __init__(self, keys, values, rows, position):
        """keys, values (slots, H, S, D); rows (B,); position (B, T)."""
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.rows, self.position = keys, values, rows, position
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys[self.rows[:, None], :, self.position] = key_states.transpose(1, 2)
        self.values[self.rows[:, None], :, self.position] = value_states.transpose(1, 2)
        return self.keys[self.rows], self.values[self.rows]


class DecodeLayer(SlotLayer):
    """A decode step: one token for every slot of this view; `rows` are all of them, in order."""

    def update(self, key_states, value_states, *args, **kwargs):
        if fused(self.keys.device):
            kernels.write(self.keys, self.values, key_states, value_states, self.position)
        else:
            super().update(key_states, value_states)
        return self.keys, self.values

    @property
    def mask(self):
        """What the attention of this step is told: where it sees, or for the kernel the last position that it sees."""
        if fused(self.keys.device):
            return self.position[:, :, None, None]  # (B, 1, 1, 1)
        return (torch.arange(self.keys.shape[2], device=self.keys.device) <= self.position)[:, None, None]  # (B,1,1,S)


def linear_layer(conv, recurrent):
    """The state of one linear-attention layer on these very buffers."""
    layer = LinearAttentionLayer()
    layer.conv_states[0], layer.recurrent_states[0] = conv, recurrent
    layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = layer.has_previous_state[0] = True
    layer.conv_kernel_size[0], layer.dtype, layer.device = conv.shape[-1], conv.dtype, conv.device
    return layer


def layers_of(cache: Cache):
    """-> (is attention, keys or convolution state, values or recurrent state) of each layer."""
    return [(True, layer.keys, layer.values) if isinstance(getattr(layer, "keys", None), torch.Tensor)
            else (False, layer.conv_states[0], layer.recurrent_states[0]) for layer in cache.layers]  # fmt: skip


def probe(model) -> Cache:
    """The cache of two tokens: what one layer keeps, and how much of it."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model.base_model(
            torch.zeros(1, 2, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True
        )
    return cache


def bytes_per_slot(model, positions: int) -> int:
    """Memory of one slot of so many positions."""
    return sum(t.element_size() * (t.numel() // t.shape[2] * positions if attention else t.numel())
               for attention, *pair in layers_of(probe(model)) for t in pair)  # fmt: skip
