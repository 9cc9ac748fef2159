import pytest

from megatron_xmod.config.deepspeed import deep_merge, deepspeed_config, gradient_accumulation
from megatron_xmod.config.schema import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_xmod.errors import UserError


def config(deepspeed=None, zero_stage=1, clipping=0.7, **train) -> Config:
    return Config(parallel=ParallelConfig(zero_stage=zero_stage), optimizer=OptimizerConfig(gradient_clipping=clipping),
                  train=TrainConfig(**({"precision": "fp32"} | train)), deepspeed=deepspeed or {})


def test_bf16_keeps_fp32_gradient_sums_under_zero_1():
    derived = deepspeed_config(config(precision="bf16", global_batch_size=24, micro_batch_size=2), 4)
    assert derived.pop("steps_per_print") > 10**8
    assert derived == {
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 1}, "gradient_clipping": 0.7, "wall_clock_breakdown": False,
        "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
    }


def test_fp32_names_no_precision():
    assert not {"bf16", "fp16", "data_types"} & deepspeed_config(config(), 1).keys()


def test_without_zero_the_program_clips_itself():
    assert deepspeed_config(config(zero_stage=0), 1)["gradient_clipping"] == 0.0


def test_extra_keys_join_the_derived_sections():
    merged = deepspeed_config(config({"zero_optimization": {"reduce_bucket_size": 7}, "memory_breakdown": True}), 1)
    assert merged["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 7}
    assert merged["memory_breakdown"] is True


@pytest.mark.parametrize(("extra", "path", "setting"), [
    ({"train_batch_size": 8}, "train_batch_size", "train.global_batch_size"),
    ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "parallel.zero_stage"),
    ({"zero_optimization": 1}, "zero_optimization", "parallel.zero_stage"),
    ({"bf16": {"enabled": True}}, "bf16.enabled", "train.precision"),
    ({"bf16": True}, "bf16", "train.precision"),
    ({"fp16": {"enabled": False}}, "fp16.enabled", "train.precision"),
    ({"gradient_clipping": 1}, "gradient_clipping", "optimizer.gradient_clipping"),
    ({"optimizer": {"type": "Adam"}}, "optimizer.type", "optimizer.name"),
    ({"tensorboard": {"enabled": True}}, "tensorboard.enabled", "train.tensorboard"),
])
def test_a_derived_key_is_refused_with_the_setting_to_use(extra, path, setting):
    with pytest.raises(UserError) as error:
        deepspeed_config(config(extra), 1)
    assert f"deepspeed.{path} " in str(error.value) and setting in str(error.value)


def test_every_derived_key_is_refused():
    def leaves(tree, path=()):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from leaves(value, (*path, key))
            else:
                yield (*path, key), value

    for path, value in leaves(deepspeed_config(config(precision="bf16"), 1)):
        for key in reversed(path):
            value = {key: value}
        with pytest.raises(UserError, match="can't be set"):
            deepspeed_config(config(value), 1)


def test_a_name_that_only_begins_like_a_derived_key_passes():
    assert deepspeed_config(config({"optimizer_extra": 1}), 1)["optimizer_extra"] == 1


@pytest.mark.parametrize(("batch", "micro", "ranks", "steps"), [(8, 1, 1, 8), (8, 2, 4, 1), (24, 2, 3, 4)])
def test_gradient_accumulation(batch, micro, ranks, steps):
    assert gradient_accumulation(config(global_batch_size=batch, micro_batch_size=micro), ranks) == steps


@pytest.mark.parametrize(("batch", "micro", "ranks", "nearest"), [(10, 2, 2, "8 and 12"), (3, 1, 4, "4")])
def test_a_batch_the_ranks_cannot_share(batch, micro, ranks, nearest):
    with pytest.raises(UserError, match=rf"global_batch_size is {batch}.*The nearest: {nearest}\."):
        gradient_accumulation(config(global_batch_size=batch, micro_batch_size=micro), ranks)


def test_deep_merge_leaves_its_arguments_alone():
    base, extra = {"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": {"e": 4}}
    assert deep_merge(base, extra) == {"a": {"b": 1, "d": 3}, "c": {"e": 4}}
    assert base == {"a": {"b": 1}, "c": 2} and extra == {"a": {"d": 3}, "c": {"e": 4}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deepspeed_takes_it(precision):
    parse = pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig
    parsed = parse(deepspeed_config(config({"zero_optimization": {"reduce_bucket_size": 7}}, precision=precision), 1))
    assert (parsed.gradient_accumulation_steps, parsed.zero_config.stage, parsed.gradient_clipping) == (8, 1, 0.7)
    assert parsed.zero_config.reduce_bucket_size == 7
    assert parsed.bfloat16_config.enabled == (precision == "bf16")
    assert parsed.grad_accum_dtype == ("fp32" if precision == "bf16" else None)
