import io
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_xmod.config.schema import OptimizerConfig
from megatron_xmod.kernels.adamw import torch_foreach
from megatron_xmod.train.optimizer import build_optimizer, global_grad_norm, orthogonalise

ONE_PROCESS = SimpleNamespace(tensor_group=None, pipeline_group=None, tensor_rank=0, pipeline_rank=0, tensor_size=1,
                              pipeline_size=1)
SHAPES = {"tall": ("matrix", (3, 12, 5)), "wide": ("matrix", (2, 2, 4, 9)), "square": ("matrix", (6, 6)),
          "embedding": ("embedding", (11, 6)), "norm": ("other", (6,)), "scale": ("other", ())}
ADAMW = OptimizerConfig(lr=0.01, gradient_clipping=0)
MUON = OptimizerConfig(name="muon", lr=0.01, muon_lr=0.02, gradient_clipping=0)


def make_parameter(value, kind="other", tensor_parallel_dim=None):
    parameter = torch.nn.Parameter(value.clone())
    parameter.kind, parameter.tensor_parallel_dim = kind, tensor_parallel_dim
    return parameter


def make_model(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {name: make_parameter(torch.randn(shape, generator=generator, dtype=dtype), kind)
            for name, (kind, shape) in SHAPES.items()}


def gradients(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, (_, shape) in SHAPES.items()}


def build(model, config, zero_stage=0):
    return build_optimizer(model.items(), config, ONE_PROCESS, zero_stage=zero_stage)


def train(model, optimizer, steps, dtype=torch.float64):
    for step in steps:
        for name, gradient in gradients(step, dtype).items():
            model[name].grad = gradient
        optimizer.step()


def snapshot(model):
    return {name: p.detach().clone() for name, p in model.items()}


def assert_same(model, expected):
    for name, p in model.items():
        assert torch.equal(p, expected[name]), name


def reference_adamw(parameters, weight_decay, fused):
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, fused=fused)


@pytest.mark.parametrize("dtype, fused, tolerance", [(torch.float64, False, 1e-13), (torch.float32, False, 1e-6),
                                                     (torch.float32, True, 0)])
def test_adamw_equals_torch(dtype, fused, tolerance):
    model, expected = make_model(dtype), make_model(dtype)
    decayed = [p for p in expected.values() if p.kind != "other"]
    references = [reference_adamw(decayed, 0.1, fused),
                  reference_adamw([p for p in expected.values() if p.kind == "other"], 0.0, fused)]
    optimizer = build(model, ADAMW)
    for step in range(5):
        train(model, optimizer, [step], dtype)
        for name, gradient in gradients(step, dtype).items():
            expected[name].grad = gradient
        for reference in references:
            reference.step()
    for name in model:
        torch.testing.assert_close(model[name], expected[name], rtol=tolerance, atol=tolerance)


def test_implementations_of_adamw_share_their_state():
    """A run goes on under another one, from what the first saved."""
    model, expected = make_model(), make_model()
    train(expected, build(expected, ADAMW), range(4))
    first = build(model, ADAMW)
    train(model, first, range(2))
    second = build_optimizer(model.items(), ADAMW, ONE_PROCESS, zero_stage=0, adamw=torch_foreach)
    second.load_state_dict(first.state_dict())
    train(model, second, range(2, 4))
    for name in model:
        torch.testing.assert_close(model[name], expected[name], rtol=1e-13, atol=1e-13)


def test_muon_equals_torch_slice_by_slice(monkeypatch):
    # torch's Muon always iterates in bf16. In fp64 the two must agree to rounding.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    model, optimizer = make_model(), None
    slices = {name: [torch.nn.Parameter(m.clone()) for m in p.detach().reshape(-1, *p.shape[-2:])]
              for name, p in model.items() if p.kind == "matrix"}
    reference = torch.optim.Muon([m for stack in slices.values() for m in stack], lr=0.02, weight_decay=0.1,
                                 momentum=0.95, nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw")
    optimizer = build(model, MUON)
    for step in range(4):
        train(model, optimizer, [step])
        for name, stack in slices.items():
            for matrix, gradient in zip(stack, gradients(step)[name].reshape(-1, *stack[0].shape), strict=True):
                matrix.grad = gradient
        reference.step()
    for name, stack in slices.items():
        torch.testing.assert_close(model[name].detach().reshape(-1, *stack[0].shape), torch.stack(list(stack)).detach(),
                                   rtol=1e-12, atol=1e-12)


def test_muon_moves_the_rest_as_adamw():
    with_muon, with_adamw = make_model(), make_model()
    train(with_muon, build(with_muon, MUON), range(3))
    train(with_adamw, build(with_adamw, ADAMW), range(3))
    for name, p in with_muon.items():
        assert torch.equal(p, with_adamw[name]) == (p.kind != "matrix"), name


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_newton_schulz_equals_torch_in_bf16(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = torch.stack([_zeropower_via_newtonschulz(m, (3.4445, -4.7750, 2.0315), 5, 1e-7) for m in matrices])
    torch.testing.assert_close(orthogonalise(matrices, 5), expected, rtol=0.05, atol=0.02)


def test_orthogonalise_keeps_singular_vectors_and_levels_values():
    matrix = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    result = orthogonalise(matrix, 5)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    off_diagonal = u.mT @ result @ v.mT
    off_diagonal.diagonal(dim1=-2, dim2=-1).zero_()
    assert off_diagonal.abs().max() < 1e-12
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4), 5), torch.zeros(2, 3, 4))


def test_muon_update_has_the_configured_rms():
    weight = make_parameter(torch.zeros(2, 64, 32), "matrix")
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    build({"weight": weight}, OptimizerConfig(name="muon", muon_lr=1.0, rms_match=0.3)).step()
    assert weight.square().mean().sqrt().item() == pytest.approx(0.3, rel=0.2)


def test_stack_equals_separate_matrices():
    stack = make_parameter(torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(4)), "matrix")
    separate = {str(i): make_parameter(m, "matrix") for i, m in enumerate(stack.detach())}
    optimizers = build({"stack": stack}, MUON), build(separate, MUON)
    for step in range(3):
        stack.grad = torch.randn(stack.shape, generator=torch.Generator().manual_seed(step))
        for i, p in enumerate(separate.values()):
            p.grad = stack.grad[i].clone()
        for optimizer in optimizers:
            optimizer.step()
    expected = torch.stack([p.detach() for p in separate.values()])
    torch.testing.assert_close(stack.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config, expected", [
    (ADAMW, [("adamw", 0.01, 0.1, {"tall", "wide", "square", "embedding"}), ("adamw", 0.01, 0.0, {"norm", "scale"})]),
    (MUON, [("muon", 0.02, 0.1, {"tall", "wide", "square"}), ("adamw", 0.01, 0.1, {"embedding"}),
            ("adamw", 0.01, 0.0, {"norm", "scale"})])])
def test_groups(config, expected):
    model = make_model()
    names = {p: name for name, p in model.items()}
    groups = [(g["algorithm"], g["lr"], g["weight_decay"], {names[p] for p in g["params"]})
              for g in build(model, config).param_groups]
    assert groups == expected


def test_empty_groups_and_frozen_parameters_are_left_out():
    model = make_model()
    for name in ("embedding", "square"):
        model[name].requires_grad_(False)
    muon, other = build(model, MUON).param_groups
    assert [muon["algorithm"], other["algorithm"]] == ["muon", "adamw"]
    assert all(p is not model["square"] for p in muon["params"])


def test_a_parameter_without_kind_is_named():
    with pytest.raises(AssertionError, match="head.weight"):
        build({"head.weight": torch.nn.Parameter(torch.zeros(2))}, ADAMW)


def test_muon_refuses_shards():
    mesh = SimpleNamespace(**{**vars(ONE_PROCESS), "tensor_size": 2})
    with pytest.raises(AssertionError, match="whole matrices"):
        build_optimizer(make_model().items(), MUON, mesh, zero_stage=0)


@pytest.mark.parametrize("config", [ADAMW, MUON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_dict_round_trip_is_exact(config, dtype):
    unbroken = make_model(dtype)
    train(unbroken, build(unbroken, config), range(6), dtype)

    model = make_model(dtype)
    optimizer = build(model, config)
    train(model, optimizer, range(3), dtype)
    file = io.BytesIO()
    torch.save([snapshot(model), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)

    resumed = {name: make_parameter(weights[name], kind) for name, (kind, _) in SHAPES.items()}
    optimizer = build(resumed, config)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, range(3, 6), dtype)
    assert_same(resumed, unbroken)


def test_flat_pieces_in_place_of_parameters_as_under_zero():
    model, whole = make_model(torch.float32), make_model(torch.float32)
    optimizer = build(model, ADAMW, zero_stage=1)
    names = {p: name for name, p in model.items()}
    order = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [torch.cat([p.detach().flatten() for p in group["params"]]).requires_grad_()]
    reference = build(whole, ADAMW)
    for step in range(3):
        train(whole, reference, [step], torch.float32)
        gradient = gradients(step, torch.float32)
        groups = optimizer.param_groups
        for group, members in zip(groups, order, strict=True):  # ZeRO steps group by group
            group["params"][0].grad = torch.cat([gradient[name].flatten() for name in members])
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
    assert optimizer.grad_norm is None
    for group, members in zip(optimizer.param_groups, order, strict=True):
        torch.testing.assert_close(group["params"][0], torch.cat([whole[name].flatten() for name in members]),
                                   rtol=1e-6, atol=1e-7)


def test_norm_equals_torch():
    model = make_model()
    for name, gradient in gradients(0).items():
        model[name].grad = gradient
    model["square"].grad = None
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.values() if p.grad is not None])
    assert global_grad_norm(list(model.values()), ONE_PROCESS).item() == pytest.approx(expected.item(), rel=1e-13)


def test_norm_of_a_large_fp32_gradient_is_accurate():
    p = make_parameter(torch.zeros(5_000_000))
    p.grad = torch.full_like(p, 0.1)
    assert global_grad_norm([p], ONE_PROCESS).item() == pytest.approx(0.1 * math.sqrt(5e6), rel=1e-7)


def test_norm_without_gradients_is_zero():
    assert global_grad_norm([make_parameter(torch.ones(3))], ONE_PROCESS).item() == 0


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_equals_torch(max_norm):
    model, expected = make_model(), make_model()
    optimizer = build(model, OptimizerConfig(lr=0.01, gradient_clipping=max_norm))
    train(model, optimizer, [0])
    for name, gradient in gradients(0).items():
        expected[name].grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(expected.values(), max_norm)
    assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    for name, p in model.items():
        torch.testing.assert_close(p.grad, expected[name].grad, rtol=1e-12, atol=0)


def test_without_clipping_the_norm_is_only_measured():
    model = make_model()
    optimizer = build(model, ADAMW)
    train(model, optimizer, [0])
    assert optimizer.grad_norm > 1
    for name, gradient in gradients(0).items():
        assert torch.equal(model[name].grad, gradient)


@pytest.mark.parametrize("config", [ADAMW, MUON])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(config, bad):
    model, undisturbed = make_model(), make_model()
    optimizer = build(model, config)
    train(undisturbed, build(undisturbed, config), range(2))
    train(model, optimizer, [0])
    before = snapshot(model)
    for name, gradient in gradients(7).items():
        model[name].grad = gradient
    model["norm"].grad[2] = bad
    optimizer.step()
    assert optimizer.overflow and not math.isfinite(optimizer.grad_norm)
    assert_same(model, before)
    train(model, optimizer, [1])
    assert not optimizer.overflow and math.isfinite(optimizer.grad_norm)
    assert_same(model, undisturbed)


def two_rank_cases(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    world = dist.group.WORLD
    tensor = SimpleNamespace(**{**vars(ONE_PROCESS), "tensor_group": world, "tensor_rank": rank, "tensor_size": 2})
    pipeline = SimpleNamespace(**{**vars(ONE_PROCESS), "pipeline_group": world, "pipeline_rank": rank,
                                  "pipeline_size": 2})
    whole = gradients(0)
    expected = torch.nn.utils.get_total_norm(list(whole.values())).item()

    sharded = {"tall": 1, "wide": 3, "embedding": 1}
    shards = []
    for name, gradient in whole.items():
        dim = sharded.get(name)
        p = make_parameter(gradient if dim is None else gradient.tensor_split(2, dim)[rank], tensor_parallel_dim=dim)
        p.grad = p.detach().clone()
        shards.append(p)
    norms = [global_grad_norm(shards, tensor)]

    stage = {name: p for i, (name, p) in enumerate(make_model().items()) if i % 2 == rank}
    for name, p in stage.items():
        p.grad = whole[name].clone()
    norms.append(global_grad_norm(list(stage.values()), pipeline))
    for norm in norms:
        assert norm.item() == pytest.approx(expected, rel=1e-13)
        both = [torch.zeros_like(norm) for _ in range(2)]
        dist.all_gather(both, norm)
        assert torch.equal(*both)

    optimizer = build_optimizer(stage.items(), OptimizerConfig(gradient_clipping=1.0), pipeline, zero_stage=0)
    if rank == 1:
        next(iter(stage.values())).grad.view(-1)[0] = math.inf
    before = snapshot(stage)
    optimizer.step()
    assert optimizer.overflow
    assert_same(stage, before)
    dist.destroy_process_group()


def test_two_ranks_agree_on_the_norm_and_on_leaving_out_a_step(tmp_path):
    mp.spawn(two_rank_cases, (tmp_path,), nprocs=2)
