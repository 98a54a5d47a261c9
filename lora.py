"""`--lora RANK`: low-rank adapters on every linear layer of the decoder, where full fine-tuning does not fit.

peft puts A (r, in) and B (out, r) beside each frozen weight W (out, in) and computes (W + s B A) x with s = 2. The
model keeps its Hugging Face class, so training is the same code. What samples is a plain copy whose weights are
W + s B A: the sampler never meets an adapter.
"""

import torch


def add_adapters(model, rank: int) -> None:
    """Freeze the model and give it fp32 adapters, B = 0, A always the same. Raises ValueError without peft."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(f"--lora: expected the package peft, found: {error}; pip install peft") from error
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), model)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)
        if weight.requires_grad:
            weight.data = weight.data.float()


@torch.no_grad()
def merge(model, actor) -> None:
    """Each adapted weight of `model` into the same layer of `actor`, summed in fp32, rounded once, in place."""
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            merged = layer.base_layer.weight.float() + layer.get_delta_weight("default")  # W + s B A: (out, in)
            actor.get_submodule(name).weight.copy_(merged)
