"""Adapters: what trains, what samples, what a checkpoint holds."""

import copy
import sys

import pytest
import torch
from test_logprobs import ROWS
from test_rsft import accepted
from transformers import AutoModelForCausalLM

from model import Policy, Row
from rsft import ascend
from sampler import Request

pytest.importorskip("peft", reason="--lora is optional and needs peft: pip install peft")


def adamw(policy):
    return torch.optim.AdamW(policy.trained().values(), lr=1e-2, weight_decay=0.0, fused=True)


@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_only_adapters_move_and_what_samples_moves_with_them_in_place(tiny, architecture):
    policy, plain = (Policy.load(str(tiny(architecture)), lora=rank) for rank in (4, 0))
    with torch.no_grad():
        assert torch.equal(policy.logprobs(ROWS), plain.logprobs(ROWS))  # B = 0: theta_0 is the model
    base, addresses = plain.weights(), [weight.data_ptr() for weight in policy.actor.parameters()]
    ascend(policy, adamw(policy), accepted(4), 64, 4096, 1.0, seed=0)
    for name, weight in policy.model.named_parameters():
        assert "lora_" in name or torch.equal(weight, base[name.replace(".base_layer", "")])
    adapted = {name.split(".lora_")[0] for name in policy.trained()}
    decoder = plain.model.base_model.named_modules()
    assert adapted == {f"model.{name}" for name, layer in decoder if isinstance(layer, torch.nn.Linear)}

    policy._refresh_actor()
    assert [weight.data_ptr() for weight in policy.actor.parameters()] == addresses
    ids = torch.tensor([ROWS[0].ids])
    with torch.no_grad():
        assert (policy.actor(ids).logits - policy.model(ids).logits).abs().max() < 1e-4
        assert (policy.actor(ids).logits - plain.model(ids).logits).abs().max() > 1e-2


def test_samples_come_from_the_adapted_weights(tiny):
    policy, found = Policy.load(str(tiny()), lora=4), {}
    ascend(policy, adamw(policy), accepted(4), 64, 4096, 1.0, seed=0)
    policy.converse([("only", Request(ROWS[0].ids, 0, 8))], lambda ended: found.update(ended) or [], 16)
    ids, n = found["only"].ids, len(ROWS[0].ids)
    with torch.no_grad():
        again = policy.logprobs([Row((*ROWS[0].ids, *ids), (False,) * n + (True,) * len(ids))])
    assert (again - torch.tensor(found["only"].logprobs)).abs().max() < 1e-4


def test_a_checkpoint_loads_as_a_plain_model_and_resumes_exactly(tiny, tmp_path):
    policy = Policy.load(str(tiny()), lora=4)
    optimizer = adamw(policy)
    ascend(policy, optimizer, accepted(4), 64, 4096, 1.0, seed=0)
    policy.save(tmp_path)
    state = copy.deepcopy(optimizer.state_dict())
    merged, ids = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), torch.tensor([ROWS[0].ids])
    with torch.no_grad():
        assert (merged(ids).logits - policy.model(ids).logits).abs().max() < 1e-4

    again = Policy.load(str(tiny()), lora=4)
    again.restore(tmp_path)
    optimizer_again = adamw(again)
    optimizer_again.load_state_dict(state)
    for side, with_optimizer in ((policy, optimizer), (again, optimizer_again)):
        ascend(side, with_optimizer, accepted(6), 64, 4096, 1.0, seed=1)
    assert all(torch.equal(weight, again.weights()[name]) for name, weight in policy.weights().items())


def test_without_peft_it_says_what_to_install(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="--lora: .*pip install peft"):
        Policy.load(str(tiny()), lora=4)
