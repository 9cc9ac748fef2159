import math

import pytest
import torch

from megatron_xmod.kernels import reference

triton_select = pytest.importorskip("megatron_xmod.kernels.triton_select", reason="triton is not installed")
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["torch", "triton"])
def select(request, device, monkeypatch):
    """An implementation, as a function of scores and count; the kernel works in several blocks."""
    function = reference.select_round if request.param == "torch" else triton_select.select_round
    monkeypatch.setattr(triton_select, "_LARGEST_BLOCK", 16)
    return lambda score, count: tuple(x.cpu() for x in function(score.to(device), count))


def share_out(score_SR, count):
    """[R, K] tokens, by hand: layers choose in turn; NaN is highest, the earlier token of equals first."""
    left, found = list(range(len(score_SR))), []
    for scores in score_SR.double().T.tolist():
        left.sort(key=lambda token: (0, 0, token) if math.isnan(scores[token]) else (1, -scores[token], token))
        found.append(sorted(left[:count]))
        left = left[count:]
    return found


def check(select, score_BSR, count):
    owner_BS, positions_RBK = select(score_BSR, count)
    expected = torch.tensor([share_out(score, count) for score in score_BSR]).transpose(0, 1)
    assert owner_BS.dtype == positions_RBK.dtype == torch.int64
    torch.testing.assert_close(positions_RBK, expected, rtol=0, atol=0)
    layers = score_BSR.shape[-1]
    expected_owner = torch.full(score_BSR.shape[:2], layers)
    for layer in range(layers):
        expected_owner.scatter_(1, expected[layer], layer)
    torch.testing.assert_close(owner_BS, expected_owner, rtol=0, atol=0)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("batch, length, layers, count", [(2, 37, 3, 12), (1, 32, 16, 2), (3, 20, 1, 5), (1, 50, 2, 3),
                                                          (1, 1, 1, 1)])
def test_equals_one_layer_after_another(select, batch, length, layers, count):
    check(select, normal(batch, length, layers), count)


def test_one_block(device):
    check(lambda score, count: [x.cpu() for x in triton_select.select_round(score.to(device), count)],
          normal(2, 200, 2), 100)


def test_bf16_scores(select):
    check(select, normal(1, 37, 2, dtype=torch.bfloat16), 18)


@pytest.mark.parametrize("values", [[0.0], [1.0, 2.0], [0.0, -0.0], [-INF, 0.5], [-INF, INF, 0.0, -1.0],
                                    [NAN, -NAN, INF, 3.0], [1e-45, -1e-45, 0.0, -0.0, 3e38, -3e38, 1e-38]])
def test_ties_and_extremes(select, values):
    choice = torch.randint(len(values), (1, 41, 3), generator=torch.Generator().manual_seed(1))
    check(select, torch.tensor(values)[choice], 13)


def test_numbers_that_only_fp64_tells_apart(select):
    check(select, 1 + 1e-12 * normal(1, 20, 2, dtype=torch.float64), 7)


def test_scores_in_any_layout(select):
    check(select, normal(2, 2, 15).mT, 7)  # layer by layer
    check(select, normal(15, 2, 4).transpose(0, 1)[..., ::2], 7)


def test_layers_that_take_nothing(select):
    owner_BS, positions_RBK = select(normal(2, 3, 5), 0)
    assert positions_RBK.shape == (5, 2, 0) and (owner_BS == 5).all()


def test_more_than_there_is(device):
    with pytest.raises(AssertionError, match="3 layers can't each take 4 of 10 tokens"):
        triton_select.select_round(normal(1, 10, 3).to(device), 4)
