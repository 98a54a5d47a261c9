"""Fast sampling with one transformers model: slots of a static cache, refilled as replies end, one graphed decode step.

Every reply being sampled owns a *slot*: a row of preallocated buffers that holds the keys and values of its context
(or the state of a linear-attention layer). A distinct prompt is prefilled once and its slot copied to all its samples;
what half of a prompt or more has in common with another is prefilled once for both. A decode step feeds every slot its
newest token and draws the next one, in place, on views [:b] x [:s] of the buffers (b slots, s positions, from short
lists of sizes), so that on a GPU it is a handful of CUDA graphs. They read the weights where they are: a training step
needs no new capture.

While the GPU runs a chunk of steps, `answer` is asked about the replies that ended in the chunk before: harnesses and
environments work beside the sampling. A next turn whose context extends what its slot holds feeds only the new tokens.
"""

from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix

import torch
from transformers.cache_utils import Cache, DynamicCache

from sampler import Request, Sample, draw, fused, kernels, left_padded
from slot_cache import DecodeLayer, SlotLayer, layers_of, linear_layer, probe

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_5_text")


def shared_prefixes(contexts, held):
    """-> (context, leader, tokens that it takes over from its leader) of each context, leaders with 0. Sorted, contexts
    with a long common start are neighbours; the first of them leads, and so does each one that a slot holds already."""
    leader = ()
    for context in sorted(contexts):
        shared = len(commonprefix([leader, context[:-1]]))
        if context in held:
            yield context, context, len(context) - 1
        elif 2 * shared >= len(context):
            yield context, leader, shared
            continue
        else:
            yield context, context, 0
        leader = context


@dataclass
class Tenant:
    """What a slot is used for."""

    key: object
    request: Request
    length: int  # tokens of context and reply at the last look, with the one drawn when the reply began
    ended: bool = False  # the reply is whole; the slot waits for a next turn
    fed: int | None = None  # a next turn waits to be prefilled: positions that the slot holds already

    @property
    def runs(self) -> bool:
        return not self.ended and self.fed is None


class SlotSampler:
    def __init__(self, model, eos_ids, temperature, top_k, top_p, slots: int, positions: int, stopped=None,
                 chunk=None):  # fmt: skip
        """slots: replies sampled at one time; positions: longest context plus reply, in tokens; stopped(request, ids):
        whether a reply holds one of its stop texts."""
        self.model, self.device, self.settings = model, model.device, (temperature, top_k, top_p)
        self.use_graphs = model.device.type == "cuda"
        self.chunk, self.prefill_tokens = (chunk or 16, 65536) if self.use_graphs else (chunk or 4, 4096)
        self.slots, self.positions, self.eos_ids = slots, positions, set(eos_ids)
        self.stopped = stopped or (lambda request, ids: False)
        self.eos = torch.tensor(sorted(eos_ids), device=self.device)
        self.hybrid = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
        # one more position takes what padding writes
        self.buffers = [(a, *(x.new_zeros(slots, *(x.shape[1:2] if a else ()), positions + 1, x.shape[-1]) if a
                              else x.new_zeros(slots, *x.shape[1:]) for x in pair))
                        for a, *pair in layers_of(probe(model))]  # fmt: skip
        zeros = lambda dtype, *shape: torch.zeros(slots, *shape, dtype=dtype, device=self.device)  # noqa: E731
        # by slot: position of the newest token, that token (not fed yet), seed, end of the budget, whether it goes on
        self.position, self.token, self.seed, self.limit = (zeros(torch.long) for _ in range(4))
        self.alive, self.ids, self.logp = (zeros(torch.bool), zeros(torch.long, positions + 1),
                                           zeros(torch.float, positions + 1))  # fmt: skip
        self.state = [self.position, self.token, self.seed, self.limit, self.alive, self.ids, self.logp]
        self.rows = torch.arange(slots, device=self.device)  # kept: captured graphs read it
        self.graphs, self.pool = {}, None

    # One decode step ------------------------------------------------------------------------------------------------

    def _goes_on(self, token, position, limit):
        return (token[:, None] != self.eos).all(-1) & (position + 1 < limit)

    def _step(self, cache, position, token, seed, limit, alive, ids, logp):
        """Feed each slot its newest token and draw the next one, in place. A slot that has ended feeds the same token
        to the same position again, which changes nothing that attention reads."""
        mask = next(layer.mask for layer in cache.layers if isinstance(layer, DecodeLayer))
        mask = {"full_attention": mask, "linear_attention": None} if self.hybrid else mask
        logits = self.model(input_ids=token[:, None], position_ids=position[:, None], attention_mask=mask,
                            past_key_values=cache, use_cache=True).logits[:, -1]  # (b, V)  # fmt: skip
        drawn, drawn_logp = draw(logits, seed, position + 1, *self.settings)
        ids.scatter_(1, position[:, None] + 1, drawn[:, None])  # past the end of a reply nothing is read
        logp.scatter_(1, position[:, None] + 1, drawn_logp[:, None])
        token.copy_(torch.where(alive, drawn, token))
        position.add_(alive)
        alive.logical_and_(self._goes_on(token, position, limit))

    def _run(self, b: int, s: int) -> None:
        """Launch a chunk of decode steps on the first b slots and s positions."""
        step, steps = self.graphs.get((b, s)), self.chunk
        if step is None:
            views, rows = [t[:b] for t in self.state], self.rows[:b]
            cache = Cache(layers=[DecodeLayer(x[:b, :, :s], y[:b, :, :s], rows, views[0][:, None]) if attention
                                  else linear_layer(x[:b], y[:b]) for attention, x, y in self.buffers])  # fmt: skip
            step = partial(self._step, cache, *views)
            if self.use_graphs:
                step, steps = self._capture(step), steps - 1
                self.graphs[b, s] = step
        for _ in range(steps):
            step()

    def _size(self, n: int, least: int, most: int) -> int:
        """What a decode step must cover for n slots or positions: on a GPU a power of two, so that graphs are few."""
        return min(max(least, 1 << (n - 1).bit_length()) if self.use_graphs else n, most)

    def _capture(self, step):
        """A CUDA graph of this step. The first step is a real one, which warms up; capturing executes nothing."""
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        self.pool = graph.pool()
        return graph.replay

    # Prefill --------------------------------------------------------------------------------------------------------

    def _feed(self, slots: list[int], starts: list[int], contexts: list[tuple[int, ...]]) -> torch.Tensor:
        """Feed each of these slots its context from position `start` on -> hidden state of the last token (B, D).
        Right-padded: padding writes past the context, where nothing reads before a real token overwrites it."""
        new = [context[start:] for start, context in zip(starts, contexts, strict=True)]
        T, rows = max(map(len, new)), torch.tensor(slots, device=self.device)
        ids = torch.tensor([[*n, *[0] * (T - len(n))] for n in new], device=self.device)  # (B, T)
        position = torch.tensor(starts, device=self.device)[:, None] + torch.arange(T, device=self.device)  # (B, T)
        position = position.clamp(max=self.positions)
        s = min(max(map(len, contexts)) + T, self.positions)
        mask = torch.arange(s + 1, device=self.device) <= position[:, None, :, None]  # (B, 1, T, s + 1)
        layers = [
            SlotLayer(k[:, :, : s + 1], v[:, :, : s + 1], rows, position.clamp(max=s)) for _, k, v in self.buffers
        ]
        hidden = self.model.base_model(input_ids=ids, position_ids=position, attention_mask=mask, use_cache=True,
                                       past_key_values=Cache(layers=layers)).last_hidden_state  # fmt: skip
        return hidden[torch.arange(len(new)), torch.tensor([len(n) - 1 for n in new])]

    def _feed_hybrid(self, slots: list[int], contexts: list[tuple[int, ...]]) -> torch.Tensor:
        """The same for a model with recurrent state, from position 0. Left-padded, since the state must end at the last
        token; keys and values lose the padding on their way into the slots."""
        ids, mask, padding = left_padded(contexts, self.device)
        n = torch.arange(ids.shape[1], device=self.device)
        cache, rows = DynamicCache(config=self.model.config), torch.tensor(slots, device=self.device)
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=True, past_key_values=cache,
                                       position_ids=(n - padding[:, None]).clamp(min=0)).last_hidden_state  # fmt: skip
        shift = (n + padding[:, None]).clamp(max=len(n) - 1)[:, None, :, None]  # (B, 1, T, 1)
        for (attention, *to), (_, *have) in zip(self.buffers, layers_of(cache), strict=True):
            for buffer, x in zip(to, have, strict=True):
                if attention:
                    buffer[rows, :, : len(n)] = x.gather(2, shift.expand(-1, x.shape[1], -1, x.shape[3]))
                else:
                    buffer[rows] = x
        return hidden[:, -1]

    def _copy(self, src: list[int], dst: list[int], length: int) -> None:
        """The first positions (all of a recurrent state) of some slots into others."""
        for attention, *pair in self.buffers:
            for t in pair:
                if attention:
                    t[dst, :, :length] = t[src, :, :length]
                else:
                    t[dst] = t[src]

    def _begin(self, hidden, groups: list[list[int]]) -> None:
        """Draw the first token of every slot of each group from its prompt's last hidden state (B, D)."""
        slots = [slot for group in groups for slot in group]
        prompt = torch.tensor([i for i, group in enumerate(groups) for _ in group], device=self.device)
        requests = [self.tenants[slot].request for slot in slots]
        seed, end, limit = torch.tensor([(r.seed, len(r.context), len(r.context) + r.max_tokens) for r in requests],
                                        device=self.device).T  # fmt: skip
        logits = self.model.get_output_embeddings()(hidden)[prompt]  # (n, V)
        token, logp = draw(logits, seed, end, *self.settings)
        self.token[slots], self.position[slots], self.seed[slots], self.limit[slots] = token, end, seed, limit
        self.ids[slots, end], self.logp[slots, end] = token, logp
        self.alive[slots] = self._goes_on(token, end, limit)

    def _prefill(self, groups: list[tuple[int, list[int]]]) -> None:
        """groups: (positions that the first slot holds already, the slots that share one context)."""
        groups = sorted(groups, key=lambda group: len(self._context(group)) - group[0])
        while groups:
            width = lambda n: n * (len(self._context(groups[n - 1])) - groups[n - 1][0])  # noqa: E731, B023
            n = max([1] + [n for n in range(1, len(groups) + 1) if width(n) <= self.prefill_tokens])
            part, groups = groups[:n], groups[n:]
            slots, contexts = [group[1][0] for group in part], [self._context(group) for group in part]
            if self.hybrid:
                hidden = self._feed_hybrid(slots, contexts)
            else:
                hidden = self._feed(slots, [group[0] for group in part], contexts)
            if copies := [(first, slot) for _, (first, *rest) in part for slot in rest]:
                self._copy(*map(list, zip(*copies, strict=True)), max(map(len, contexts)))
            self._begin(hidden, [group[1] for group in part])

    def _context(self, group) -> tuple[int, ...]:
        return self.tenants[group[1][0]].request.context

    # The queue ------------------------------------------------------------------------------------------------------

    def _admit(self, queue: deque) -> None:
        """Give free slots to waiting requests; a distinct context is prefilled once, from where it leaves another."""
        free = [slot for slot, tenant in enumerate(self.tenants) if tenant is None]
        held = {t.request.context: slot for slot, t in enumerate(self.tenants) if t and t.fed is None}
        new: dict[tuple, list[int]] = {}
        for slot in free[: len(queue)]:
            key, request = queue.popleft()
            self.tenants[slot] = Tenant(key, request, len(request.context) + 1)
            new.setdefault(request.context, []).append(slot)
        first = {context: slots[0] for context, slots in new.items()} | held
        leaders, followers = [], []
        for context, leader, shared in shared_prefixes(first, held):
            if context in new and shared and not self.hybrid:
                followers.append((shared, new[context], first[leader]))
            elif context in new:
                leaders.append((0, new[context]))
        self._prefill(leaders)
        for shared, slots, leader in followers:
            self._copy([leader], slots[:1], shared)
        self._prefill([(shared, slots) for shared, slots, _ in followers])

    def _compact(self) -> int:
        """Move tenants to the front -> the number of slots that a decode step must cover."""
        used = [slot for slot, tenant in enumerate(self.tenants) if tenant is not None]
        b = self._size(len(used), 8, self.slots)
        if src := [slot for slot in used if slot >= b]:
            dst = [slot for slot in range(b) if self.tenants[slot] is None][: len(src)]
            self._copy(src, dst, max(self.tenants[slot].length for slot in src) + 1)
            for t in self.state:
                t[dst] = t[src]
            for i, j in zip(src, dst, strict=True):
                self.tenants[j], self.tenants[i] = self.tenants[i], None
            self._free(src)
        return b

    def _free(self, slots) -> None:
        for slot in slots:
            self.tenants[slot] = None
        self.position[slots], self.alive[slots] = 0, False

    def _harvest(self, b: int) -> list:
        """Look at what the chunk did -> (key, sample) of the replies that ended in it."""
        alive, position = self.alive[:b].tolist(), self.position[:b].tolist()  # waits for the GPU
        found = []
        for slot, tenant in enumerate(self.tenants[:b]):
            if not tenant or not tenant.runs:
                continue
            tenant.length = position[slot] + 1
            if not alive[slot] or tenant.request.stop:
                kept = slice(len(tenant.request.context), tenant.length)
                ids = self.ids[slot, kept].tolist()
                if not alive[slot] or self.stopped(tenant.request, ids):
                    tenant.ended, self.alive[slot] = True, False
                    why = "stop" if ids[-1] in self.eos_ids else "length"
                    found.append((tenant.key, Sample(ids, self.logp[slot, kept].tolist(), why)))
        return found

    def _settle(self, ended: list, new: list, queue: deque) -> None:
        """After `answer`: a next turn goes on in the slot of its turn before, where that holds the start of its
        context; other requests wait in the queue, other slots are free."""
        held = {self.tenants[slot].key: slot for slot in ended}
        for key, request in new:
            slot = held.get(key)
            known = slot is not None and not self.hybrid and self._known(slot)
            if known and len(request.context) > len(known) and request.context[: len(known)] == known:
                self.tenants[slot] = Tenant(key, request, len(request.context) + 1, fed=len(known))
                ended.remove(slot)
            else:
                queue.append((key, request))
        self._free(ended)

    def _go_on(self, waiting: list[int]) -> None:
        """Prefill what is new in the next turns that wait in these slots."""
        groups = [(self.tenants[slot].fed, [slot]) for slot in waiting]
        for slot in waiting:
            self.tenants[slot].fed = None
        self._prefill(groups)

    def _known(self, slot: int) -> tuple[int, ...]:
        """The tokens that a slot has surely fed: its context and its reply but for the newest token."""
        context, end = self.tenants[slot].request.context, self.tenants[slot].length - 1
        return (*context, *self.ids[slot, len(context) : end].tolist())

    @torch.no_grad()
    def converse(self, requests, answer) -> None:
        """Sample a reply to each (key, request). `answer([(key, sample), ...])` is called as replies end and returns
        the (key, request) pairs to sample next; it runs while the GPU works on the other replies."""
        queue, found = deque(requests), []
        self.tenants = [None] * self.slots
        self._free(range(self.slots))
        few = max(1, self.slots // 8)  # a prefill of fewer is not worth its launches while other replies run
        with self._grouped():
            while queue or found or any(self.tenants):
                running = any(tenant and tenant.runs for tenant in self.tenants)
                waiting = [slot for slot, tenant in enumerate(self.tenants) if tenant and tenant.fed is not None]
                if waiting and (len(waiting) >= few or not running):
                    self._go_on(waiting)
                if queue and self.tenants.count(None) >= min(len(queue), few):
                    self._admit(queue)
                running = any(tenant and tenant.runs for tenant in self.tenants)
                if running:
                    b = self._compact()
                    longest = max(tenant.length for tenant in self.tenants if tenant)
                    self._run(b, self._size(longest + self.chunk, 512, self.positions))
                ended = [slot for slot, tenant in enumerate(self.tenants) if tenant and tenant.ended]
                new = answer(found) if found else []
                found = self._harvest(b) if running else []
                self._settle(ended, new, queue)

    @contextmanager
    def _grouped(self):
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("grouped")
        try:
            with kernels.fused(self.model) if fused(self.device) else nullcontext():
                yield
        finally:
            self.model.set_attn_implementation(before)

    @torch.no_grad()
    def decoding(self, work) -> None:
        """Call `work` as inside a conversation: for measuring."""
        with self._grouped():
            work()
