"""The dense block, and attention among the selected tokens against masked attention over all of them."""

from __future__ import annotations

import pytest
import torch

from megatron_xmod.kernels.attention import sdpa
from megatron_xmod.model.block import Block, attend_to_earlier
from megatron_xmod.model.sparse import SparseRound
from tests.unit.model.reference import turn
from tests.unit.model.toy import bits, distance, make_context, make_hidden, scramble

HEADS = [(4, 2), (4, 4), (4, 1)]


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def masked_layer(x_BSD, w, config, member_BS):
    """(a, f) at full length: softmax attention with the mask "not later, and both selected"; f on x + a."""
    B, S, _ = x_BSD.shape
    H, G, E = config.heads, config.kv_heads, config.head_dim

    def heads(h_BSD, matrix, weight=None):
        y_BSHE = (h_BSD @ matrix.T).view(B, S, -1, E)
        if weight is None:
            return y_BSHE
        y_BSHE = norm(y_BSHE, weight, config.norm_eps)
        return torch.stack([turn(y_BSHE[:, t], t, config.rope_theta) for t in range(S)], 1)

    h = norm(x_BSD, w.attention_norm, config.norm_eps)
    q, k, v = heads(h, w.q_proj, w.q_norm), heads(h, w.k_proj, w.k_norm), heads(h, w.v_proj)
    k, v = (torch.stack([y[:, :, head * G // H] for head in range(H)], 2) for y in (k, v))
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / E**0.5
    allowed = torch.ones(S, S, dtype=torch.bool).tril() & member_BS[:, :, None] & member_BS[:, None, :]
    # A token outside sees itself, which spares a division by 0; its update isn't used.
    allowed = allowed | torch.eye(S, dtype=torch.bool)
    p = scores.masked_fill(~allowed[:, None], -float("inf")).exp()
    y = torch.einsum("bhij,bjhe->bihe", p / p.sum(-1, keepdim=True), v).reshape(B, S, H * E)
    a = y @ w.o_proj.T
    h = norm(x_BSD + a, w.mlp_norm, config.norm_eps)
    gate = h @ w.gate_proj.T
    return a, (gate * torch.sigmoid(gate) * (h @ w.up_proj.T)) @ w.down_proj.T


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_dense_block(heads, kv_heads):
    context = make_context(model=dict(heads=heads, kv_heads=kv_heads))
    block = scramble(Block(context)).double()
    x_BSD = make_hidden(context, 3, 11)
    a, f = masked_layer(x_BSD, block.weights(), context.config, torch.ones(3, 11, dtype=torch.bool))
    assert distance(block(x_BSD), x_BSD + a + f) < 1e-13
    # Without attention to others the check would fail: attention matters here.
    alone, _ = masked_layer(x_BSD, block.weights(), context.config, torch.zeros(3, 11, dtype=torch.bool))
    assert distance(alone, a) > 1e-2


def routed_by_channel_0(context, member_BS):
    """A round of one layer that takes exactly the members, with gates of exactly 1; and an input for it."""
    sparse = scramble(SparseRound(context, 1)).double()
    with torch.no_grad():
        sparse.router.weight.zero_()[0, 0] = 1e4
        sparse.router.bias.zero_()
        sparse.router.scale.fill_(1.0)
    x_BSD = make_hidden(context, *member_BS.shape)
    x_BSD[..., 0] = torch.where(member_BS, 1.0, -1.0)
    return sparse, x_BSD


# Counts differ, one sequence sends nobody and one sends all: fillers everywhere but in the longest.
RAGGED = [[0, 1, 4, 5, 9], [], list(range(12)), [11], [0, 2, 3]]
EVEN = [[0, 5, 11], [1, 2, 3], [9, 10, 11]]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("mode", "members"), [("top_k", EVEN), ("threshold", EVEN), ("threshold", RAGGED)],
                         ids=["top_k", "threshold", "threshold with padding"])
def test_compact_attention_is_masked_attention_at_full_length(heads, kv_heads, mode, members):
    context = make_context(mode=mode, model=dict(heads=heads, kv_heads=kv_heads))
    member_BS = torch.tensor([[t in chosen for t in range(12)] for chosen in members])
    sparse, x_BSD = routed_by_channel_0(context, member_BS)
    weights = sparse.block.unbind()[0]
    a, f = masked_layer(x_BSD, weights, context.config, member_BS)
    taken_BS = torch.zeros(member_BS.shape, dtype=torch.float64)

    x_BSD.requires_grad_()
    out, taken_BS = sparse(x_BSD, taken_BS)
    assert torch.equal(taken_BS, member_BS.double())
    expected = torch.where(member_BS[..., None], x_BSD + a + f, x_BSD).detach()
    assert distance(out, expected) < 1e-13
    assert torch.equal(bits(out)[~member_BS], bits(x_BSD)[~member_BS])
    if mode == "threshold" and members is RAGGED:
        # Fillers are tokens too, with rows of their own: nothing of them may come back either.
        pull = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
        got = torch.autograd.grad((out * pull).sum(), x_BSD)[0]
        y_BSD = x_BSD.detach().requires_grad_()
        a, f = masked_layer(y_BSD, weights, context.config, member_BS)
        slow = torch.where(member_BS[..., None], y_BSD + a + f, y_BSD)
        # The routing loss is attached and saturated: its gradient is exactly 0.
        assert distance(got, torch.autograd.grad((slow * pull).sum(), y_BSD)[0]) < 1e-12


def test_causal_attention_of_the_last_tokens():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    whole = sdpa(q, k, v)
    for last in (1, 2, 5, 9):
        assert torch.allclose(attend_to_earlier(q[:, -last:], k, v), whole[:, -last:], rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"),
                         [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_rms_norm(dtype, tolerance):
    context = make_context(model=dict(norm_eps=0.1))
    x = (100 * make_hidden(context, 3, 5)).to(dtype)
    x[0] /= 3e3  # small enough for eps to matter
    weight = (1 + make_hidden(context, 1, 1, seed=1)[0, 0]).to(dtype)
    y = context.norm(x, weight)
    assert y.dtype == dtype
    assert distance(y.double(), norm(x.double(), weight.double(), 0.1)) < tolerance
    assert distance(y[0].double(), norm(x[0].double(), weight.double(), 0.1)) < tolerance
