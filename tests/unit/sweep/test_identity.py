from dataclasses import replace

from megatron_xmod.config.schema import Config, KernelsConfig, ModelConfig, RoutingConfig
from megatron_xmod.sweep.identity import config_hash, differences, is_dense


def test_the_rhythm_of_saving_and_logging_and_the_kernels_do_not_matter():
    config = Config()
    other = replace(config, train=replace(config.train, output="elsewhere", log_interval=1, save_interval=7),
                    kernels=KernelsConfig(adamw="torch_foreach"))
    assert config_hash(other) == config_hash(config) and differences(other, config) == []


def test_what_changes_results_does():
    config = Config()
    for topic, change in (("train", {"seed": 1}), ("train", {"steps": 7}), ("optimizer", {"lr": 1.0}),
                          ("data", {"seed": 1}), ("train", {"eval_interval": 3})):
        other = replace(config, **{topic: replace(getattr(config, topic), **change)})
        assert config_hash(other) != config_hash(config)
        name, value = next(iter(change.items()))
        assert differences(config, other) == [
            f"{topic}.{name} is {getattr(getattr(config, topic), name)} there, {value} here"]


def test_routing_does_not_matter_to_a_dense_model():
    dense = Config(model=ModelConfig(prefix_layers=None))
    other = Config(model=ModelConfig(prefix_layers=28, routing=RoutingConfig(K=2, A=1)))
    assert is_dense(dense) and is_dense(other) and not is_dense(Config())
    assert config_hash(dense) == config_hash(other)
    assert config_hash(Config()) != config_hash(Config(model=ModelConfig(routing=RoutingConfig(K=2, A=1))))
