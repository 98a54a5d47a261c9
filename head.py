"""log-probabilities of chosen tokens straight from hidden states: the logits of few positions exist at one time."""

import torch

HEAD_BYTES = 256 * 2**20  # of one chunk of logits, fp32


def chosen_logprobs(hidden, weight, targets) -> torch.Tensor:
    """log softmax(hidden weight^T) at the targets. hidden (N, D), weight (V, D), targets (N,) -> (N,) fp32."""
    return _ChosenLogprobs.apply(hidden, weight, targets, positions_at_once(weight.shape[0]))


def positions_at_once(V: int) -> int:
    return max(1, HEAD_BYTES // (4 * V))


class _ChosenLogprobs(torch.autograd.Function):
    """By hand for one reason: autograd would make, cast and add a whole gradient of `weight` for every chunk. Here all
    chunks are summed into one, in fp32."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, n):
        W, chosen, normalisers = weight.to(hidden.dtype), [], []
        for h, y in zip(hidden.split(n), targets.split(n), strict=True):
            logits = (h @ W.T).float()  # (n, V)
            normalisers.append(logits.logsumexp(-1))
            chosen.append(logits.gather(1, y[:, None])[:, 0])
        normaliser = torch.cat(normalisers)  # (N,)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.n = n
        return torch.cat(chosen) - normaliser

    @staticmethod
    def backward(ctx, grad):  # (N,)
        hidden, weight, targets, normaliser = ctx.saved_tensors
        W, d_hidden = weight.to(hidden.dtype), torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        chunks = zip(*(x.split(ctx.n) for x in (hidden, targets, normaliser, grad, d_hidden)), strict=True)
        for h, y, z, g, d_h in chunks:
            d = (h @ W.T).float().sub_(z[:, None]).exp_().mul_(-g[:, None])  # (n, V): -g softmax
            d = d.scatter_add_(1, y[:, None], g[:, None]).to(W.dtype)  # of the logits: g (1[target] - softmax)
            torch.mm(d, W, out=d_h)
            if d_weight is not None:
                add_product(d_weight, d.T, h)
        return d_hidden, d_weight, None, None


def add_product(total, a, b) -> None:
    """total += a b, with the product of two bf16 matrices summed in fp32 and never rounded to bf16."""
    if a.dtype != total.dtype and total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
