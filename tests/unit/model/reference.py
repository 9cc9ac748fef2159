"""X-MoD written out from the paper, token by token and head by head (arXiv 2609.34212, eq. 6-8 and 42-43).

Shares nothing with the package but the names of parameters and settings.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = ("attention_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj", "mlp_norm", "gate_proj",
         "up_proj", "down_proj")


class SlowModel:
    """A model of `prefix` dense layers and groups of `groups[i]` sparse layers, each closed by a dense layer.

    Args:
        parameters: By name, as the real model stores them.
        settings: Anything with the fields of ModelConfig.
        threshold: Routes by the causal rule and not by top-k.

    Attributes:
        counts: After each sparse layer, how often each token was selected in its group so far, [B][S].
        routing_loss: Sum over the sparse layers, not yet weighted.
    """

    def __init__(self, parameters: dict[str, Tensor], settings, prefix: int, groups: tuple[int, ...],
                 threshold: bool = False):
        self.p, self.c, self.prefix, self.groups, self.threshold = parameters, settings, prefix, groups, threshold
        self.counts: list[list[list[int]]] = []
        self.routing_loss: Tensor | float = 0.0

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] -> [B, S, V]"""
        self.counts, self.routing_loss = [], 0.0
        x = [[self.p["layers.0.weight"][token] for token in row] for row in tokens_BS.tolist()]
        for layer in range(1, 1 + self.prefix):
            x = self._dense(x, f"layers.{layer}.")
        for layer, size in enumerate(self.groups, 1 + self.prefix):
            x = self._sparse_layers(x, layer, size)
            x = self._dense(x, f"layers.{layer}.anchor.")
        last = 1 + self.prefix + len(self.groups)
        head = self.p[f"layers.{last + 1}.weight"]
        return torch.stack([torch.stack([head @ self._norm(v, self.p[f"layers.{last}.weight"]) for v in row])
                            for row in x])

    def _dense(self, x, name):
        weights = {key: self.p[name + key] for key in BLOCK}
        out = []
        for row in x:
            updates = self._updates(row, range(len(row)), weights)
            out.append([v + updates[t][0] + updates[t][1] for t, v in enumerate(row)])
        return out

    def _sparse_layers(self, x, layer, size):
        b = [[0] * len(row) for row in x]
        for j in range(size):
            # Layer j of the group is layer j mod K of round j // K.
            name = f"layers.{layer}.rounds.{j // self.c.routing.K}."
            stacked = self.p[f"{name}router.weight"].shape[0]
            assert stacked == min(self.c.routing.K, size - j // self.c.routing.K * self.c.routing.K)
            weights = {key: self.p[f"{name}block.{key}"][j % self.c.routing.K] for key in BLOCK}
            router = {key: self.p[f"{name}router.{key}"][j % self.c.routing.K] for key in ("weight", "bias", "scale")
                      if f"{name}router.{key}" in self.p}
            losses, out = [], []
            for row, b_row in zip(x, b, strict=True):
                row, row_losses = self._sparse(row, b_row, weights, router)
                out.append(row)
                losses += row_losses
            x = out
            self.routing_loss = self.routing_loss + sum(losses) / len(losses)
            self.counts.append([list(b_row) for b_row in b])
        return x

    def _sparse(self, row, b, weights, router):
        """One sequence through one sparse layer; b is counted up in place. Also each token's routing loss."""
        r = self.c.routing
        s = [router["weight"] @ v + router.get("bias", 0.0) - r.bias_scale * n for v, n in zip(row, b, strict=True)]
        if self.threshold:
            chosen = [t for t in range(len(row)) if 1 / (1 + math.exp(-s[t].item())) >= 0.5]
        else:
            ranking = sorted(range(len(row)), key=lambda t: (-s[t].item(), t))
            chosen = sorted(ranking[:len(row) // r.K])
        updates = self._updates(row, chosen, weights)
        out = list(row)
        for t in chosen:
            a, f = updates[t]
            probability = 1 / (1 + torch.exp(-s[t]))
            if r.gate == "ffn":
                out[t] = row[t] + a + probability * f
            else:
                out[t] = row[t] + router.get("scale", 1.0) * probability * (a + f)
            b[t] += 1
        losses = [torch.log(1 + torch.exp(-s[t] if t in chosen else s[t])) for t in range(len(row))]
        return out, losses

    def _updates(self, row, members, w):
        """(a, f) of each member; members see each other and nobody else, at their places in the whole sequence."""
        members = list(members)
        H, G, E = self.c.heads, self.c.kv_heads, self.c.head_dim
        q, k, v = {}, {}, {}
        for t in members:
            h = self._norm(row[t], w["attention_norm"])
            q[t] = turn(self._norm((w["q_proj"] @ h).view(H, E), w["q_norm"]), t, self.c.rope_theta)
            k[t] = turn(self._norm((w["k_proj"] @ h).view(G, E), w["k_norm"]), t, self.c.rope_theta)
            v[t] = (w["v_proj"] @ h).view(G, E)
        updates = {}
        for t in members:
            keys, values = (torch.stack([of[u] for u in members if u <= t], dim=1) for of in (k, v))
            heads = []
            for head in range(H):
                g = head // (H // G)
                weights = torch.exp(keys[g] @ q[t][head] / math.sqrt(E))
                heads.append(weights @ values[g] / weights.sum())
            a = w["o_proj"] @ torch.cat(heads)
            h = self._norm(row[t] + a, w["mlp_norm"])
            gate = w["gate_proj"] @ h
            f = w["down_proj"] @ (gate / (1 + torch.exp(-gate)) * (w["up_proj"] @ h))
            updates[t] = a, f
        return updates

    def _norm(self, v, weight):
        return weight * v / torch.sqrt((v * v).sum(-1, keepdim=True) / v.shape[-1] + self.c.norm_eps)


def turn(v: Tensor, position: int, theta: float) -> Tensor:
    """Rotary position: component j of the first half and of the second half are a complex number, turned by its angle.

    Args:
        v: [..., E], in float64.
    """
    half = v.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-j / half) for j in range(half)], dtype=torch.float64)
    z = torch.complex(v[..., :half], v[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)
