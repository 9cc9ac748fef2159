import io
import math

import pytest
import torch

from megatron_xmod.config.schema import OptimizerConfig
from megatron_xmod.train.schedule import build_scheduler, lr_factor

SCHEDULES = ["cosine", "linear", "constant", "wsd"]


def factors(steps, **settings):
    config = OptimizerConfig(**settings)
    return [lr_factor(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_to_one(schedule):
    got = factors(100, schedule=schedule, warmup_fraction=0.1)
    assert got[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert max(got) == got[9] == 1


def test_cosine():
    got = factors(101, schedule="cosine", warmup_fraction=0, min_lr_ratio=0.1)
    assert [got[0], got[25], got[50], got[100]] == pytest.approx(
        [1, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1])
    assert got == sorted(got, reverse=True)


def test_linear():
    got = factors(11, schedule="linear", warmup_fraction=0, min_lr_ratio=0.2)
    assert got == pytest.approx([1 - 0.08 * n for n in range(11)])


def test_constant():
    assert factors(10, schedule="constant", warmup_fraction=0.2, min_lr_ratio=0.1) == [0.5] + [1] * 9


def test_wsd():
    got = factors(20, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.25, min_lr_ratio=0)
    assert got == pytest.approx([0.5] + [1] * 14 + [0.8, 0.6, 0.4, 0.2, 0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps", [2, 3, 7, 1000])
@pytest.mark.parametrize("warmup_fraction", [0, 0.01, 0.3])
def test_first_highest_and_last(schedule, steps, warmup_fraction):
    got = factors(steps, schedule=schedule, warmup_fraction=warmup_fraction, decay_fraction=0.5, min_lr_ratio=0.1)
    assert max(got) == 1
    assert got[-1] == pytest.approx(0.1)
    assert got[0] == 1 / max(round(warmup_fraction * steps), 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_edges(schedule):
    assert factors(1, schedule=schedule, warmup_fraction=0) == [1]
    assert factors(1, schedule=schedule, warmup_fraction=1) == [1]
    assert factors(4, schedule=schedule, warmup_fraction=1) == [0.25, 0.5, 0.75, 1]


def test_wsd_whose_decay_is_none_or_everything():
    assert factors(5, schedule="wsd", warmup_fraction=0, decay_fraction=0) == [1] * 5
    got = factors(6, schedule="wsd", warmup_fraction=0.3, decay_fraction=1, min_lr_ratio=0)
    assert got == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_beyond_the_end_it_stays(schedule):
    config = OptimizerConfig(schedule=schedule)
    assert lr_factor(50, 20, config) == lr_factor(20, 20, config) == lr_factor(19, 20, config)


def optimizer_with_two_rates():
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)])


def test_scheduler_scales_each_group_and_resumes():
    config = OptimizerConfig(warmup_fraction=0.2)
    optimizer = optimizer_with_two_rates()
    scheduler = build_scheduler(optimizer, 10, config)
    rates, saved = [], io.BytesIO()
    for step in range(10):
        if step == 4:
            torch.save([optimizer.state_dict(), scheduler.state_dict()], saved)
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert rates == [pytest.approx([0.1 * f, 0.02 * f]) for f in factors(10, warmup_fraction=0.2)]

    saved.seek(0)
    optimizer_state, scheduler_state = torch.load(saved, weights_only=True)
    optimizer = optimizer_with_two_rates()
    scheduler = build_scheduler(optimizer, 10, config)
    optimizer.load_state_dict(optimizer_state)
    scheduler.load_state_dict(scheduler_state)
    for expected in rates[4:]:
        assert [group["lr"] for group in optimizer.param_groups] == expected
        optimizer.step()
        scheduler.step()
