import dataclasses
import os
import re
import subprocess
import sys

import pytest

from megatron_xmod.config.load import config_from_dict, config_from_layers, config_to_dict, load_config, save_config
from megatron_xmod.config.schema import Config, DataConfig, ModelConfig, OptimizerConfig, RoutingConfig, TrainConfig
from megatron_xmod.errors import CombinationError, UserError


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "a.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def message(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_given_is_the_defaults():
    assert load_config([]) == Config()


def test_later_files_win_and_the_command_line_wins_over_all(write):
    first = write("model: {hidden_size: 64, routing: {K: 4, A: 2}}\ndata: {seq_length: 64}", "first.yaml")
    second = write("model:\n  routing:\n    A: 3\n", "second.yaml")
    config = load_config(["--model.hidden_size", "96", "--config", first, f"--config={second}", "--train.steps=7"])
    assert (config.model.hidden_size, config.model.routing.K, config.model.routing.A) == (96, 4, 3.0)
    assert (config.data.seq_length, config.train.steps) == (64, 7)
    assert load_config(["--config", second, "--config", first]).model.routing.A == 2.0


def test_numbers_without_a_point_are_numbers(write):
    file = write("optimizer: {lr: 1e-4, eps: 1E-9}\nmodel: {rope_theta: 1.5e5, vocab_size: null}")
    config = load_config(["--config", file, "--optimizer.muon_lr", "3e-3"])
    assert (config.optimizer.lr, config.optimizer.eps, config.optimizer.muon_lr) == (1e-4, 1e-9, 3e-3)
    assert config.model.rope_theta == 1.5e5 and config.model.vocab_size is None


def test_null_on_the_command_line(write):
    file = write("data: {tokenizer: bytes, tokenizer_path: x, paths: [a], weights: [1]}")
    config = load_config(["--config", file, "--data.tokenizer", "null", "--data.tokenizer_path", "null",
                          "--data.weights", "null", "--model.prefix_layers", "null"])
    assert (config.data.tokenizer, config.data.tokenizer_path, config.data.weights) == (None, None, None)
    assert config.model.prefix_layers is None


@pytest.mark.parametrize("words", [["a", "b"], ["[a, b]"]])
def test_lists_are_words_or_yaml(words):
    config = load_config(["--data.paths", *words, "--data.weights", "0.5", "2", "--optimizer.betas", "0.8", "0.9"])
    assert config.data == DataConfig(paths=["a", "b"], weights=[0.5, 2.0])
    assert config.optimizer.betas == (0.8, 0.9)


def test_one_word_is_a_list_of_one():
    assert load_config(["--data.paths", "shards/a"]).data.paths == ["shards/a"]


def test_texts_that_look_like_numbers_stay_texts_on_the_command_line():
    config = load_config(["--train.output", "2024", "--data.split", "1"])
    assert (config.train.output, config.data.split) == ("2024", "1")


def test_negative_numbers_are_values():
    assert "optimizer.lr is -0.0001" in message("--optimizer.lr", "-1e-4")


def test_deepspeed_keys_are_free_and_merge(write):
    file = write("deepspeed: {zero_optimization: {reduce_bucket_size: 5, overlap_comm: true}}")
    config = load_config(["--config", file, "--deepspeed.zero_optimization.reduce_bucket_size", "5e8",
                          "--deepspeed.memory_breakdown", "true"])
    assert config.deepspeed == {"zero_optimization": {"reduce_bucket_size": 5e8, "overlap_comm": True},
                                "memory_breakdown": True}


@pytest.mark.parametrize("rank", [["--local_rank", "1"], ["--local_rank=1"], ["--local-rank=1"], ["--local-rank", "1"]])
def test_the_launchers_rank_is_ignored(rank):
    assert load_config([*rank, "--train.steps", "3"]) == load_config(["--train.steps", "3", *rank])


@pytest.mark.parametrize(("wrong", "right"), [
    ("data.seq_len", "data.seq_length"), ("model.seq_length", "data.seq_length"), ("seq_length", "data.seq_length"),
    ("sequence_length", "data.seq_length"), ("model.K", "model.routing.K"), ("routing.A", "model.routing.A"),
    ("train.lr", "optimizer.lr"), ("model.hidden-size", "model.hidden_size"), ("train.max_steps", "train.steps"),
    ("train.microbatch_size", "train.micro_batch_size"),
])
def test_unknown_settings_are_refused_with_the_nearest_name(write, wrong, right):
    expected = rf"no setting {re.escape(wrong)} \(.*did you mean {re.escape(right)}\?"
    on_line = message(f"--{wrong}", "8")
    assert re.search(expected, on_line) and "command line" in on_line
    section, _, last = wrong.rpartition(".")
    file = write("\n".join([*(f"{'  ' * i}{part}:" for i, part in enumerate(section.split(".")) if part),
                            f"{'  ' * len(section.split('.')) if section else ''}{last}: 8"]))
    in_file = message("--config", file)
    assert re.search(expected, in_file) and file in in_file


def test_two_names_equally_near_are_both_told():
    told = message("--train.batch_size", "8")
    assert "train.micro_batch_size" in told and "train.global_batch_size" in told


def test_nothing_near_lists_the_section():
    assert "parallel has tensor_parallel_size, pipeline_parallel_size, zero_stage" in message("--parallel.tp", "2")
    assert "the configuration has model, data" in message("--foo", "2")


def test_an_unknown_empty_section_is_refused(write):
    assert "modle" in message("--config", write("modle: {}"))
    assert "modle" in message("--config", write("modle:"))


@pytest.mark.parametrize("text", ["", "# nothing\n", "model:", "model:\ntrain: {}\ndeepspeed:\n", "model: {routing: }"])
def test_empty_files_and_sections_set_nothing(write, text):
    assert load_config(["--config", write(text)]) == Config()


@pytest.mark.parametrize(("text", "expected"), [
    ("model: {routing: {K: eight}}", "model.routing.K is 'eight' in .*a whole number"),
    ("model: {routing: {K: 8.5}}", "model.routing.K is 8.5 in .*a whole number"),
    ("model: {routing: {K: true}}", "model.routing.K is true in .*a whole number"),
    ("train: {steps: null}", "train.steps is null in .*a whole number"),
    ("parallel: {zero_stage: 2}", "parallel.zero_stage is 2 in .*one of 0, 1"),
    ("parallel: {zero_stage: true}", "parallel.zero_stage is true in .*one of 0, 1"),
    ("optimizer: {name: sgd}", "optimizer.name is 'sgd' in .*one of adamw, muon"),
    ("optimizer: {betas: [0.9]}", "optimizer.betas is .* a list of 2 values, each a number"),
    ("data: {paths: shard}", "data.paths is 'shard' in .*a list of values, each text"),
    ("data: {tokenizer: words}", "data.tokenizer is 'words' in .*one of sentencepiece, hf, bytes or null"),
    ("data: {split: 1}", "data.split is 1 in .*quote"),
    ("train: {tensorboard: 2}", "train.tensorboard is 2 in .*true or false"),
    ("deepspeed: 3", "deepspeed is 3 in .*a section"),
    ("model: 3", "model .*is a section"),
    ("model: {routing: 3}", r"model\.routing .*is a section.* K, A"),
])
def test_wrong_types_name_the_setting_the_file_and_the_type(write, text, expected):
    file = write(text)
    told = message("--config", file)
    assert re.search(expected, told) and file in told


@pytest.mark.parametrize(("argv", "expected"), [
    (["--model.routing.K"], "--model.routing.K takes one value, but got none"),
    (["--model.routing.K", "1", "2"], "takes one value, but got 1 2"),
    (["--config"], "--config takes one value"),
    (["stray"], "Unexpected argument 'stray'"),
    (["--model.routing", "3"], "is a section"),
    (["--train.steps", "many"], "train.steps is 'many' on the command line; it must be a whole number"),
    (["--deepspeed.a", "["], "--deepspeed.a, line 1, column 2: "),
])
def test_wrong_command_lines(argv, expected):
    assert re.search(expected, message(*argv))


def test_values_that_contradict_each_other_are_one_message(write):
    assert "data.seq_length (100) must be a multiple of model.routing.K (8)" in message("--data.seq_length", "100")


def test_files_that_cannot_be_read(write, tmp_path):
    assert "No such file" in message("--config", str(tmp_path / "none.yaml"))
    assert "can't be read" in message("--config", str(tmp_path))
    assert re.search(r"a\.yaml, line 2, column 3: ", message("--config", write("model: {\n  ]")))
    assert re.search("line 3.*train is given twice", message("--config", write("train: {}\nmodel: {}\ntrain: {}")))
    assert "line 1" in message("--config", write("? [a]\n: b")) and "line 1" in message("--config", write("a: !!x b"))
    assert "not allowed" in message("--config", write("a: \0"))
    assert "must have sections" in message("--config", write("- a\n- b\n"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a text file in UTF-8" in message("--config", str(tmp_path / "binary.yaml"))


def test_help_shows_every_setting_with_meaning_and_default(capsys):
    with pytest.raises(SystemExit) as ended:
        load_config(["--help"], "What the program does.")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "What the program does." in text
    for name, default in leaves(config_to_dict(Config())):
        found = re.search(rf" --{re.escape(name)} (?:\S+ )?(.*?) \(type: [^()]*, default: (.*?)\)(?: |$)", text)
        assert found, name
        assert len(found[1].split()) >= 2, f"{name} has no explanation"
        if not isinstance(default, (list, type(None))):
            assert found[2] == str(default)


def leaves(tree: dict, prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# No value is a default, and several are hard to write in YAML.
UNUSUAL = Config(
    model=ModelConfig(hidden_size=96, vocab_size=None, rope_theta=1e22, norm_eps=1.2345678901234567e-7, prefix_layers=0,
                      routing=RoutingConfig(K=3, A=1 / 3, gate="ffn", residual_scale=False)),
    data=DataConfig(seq_length=3072, paths=["1e-4", "null", "ü: [x]"], weights=[0.1, 2.0, 3.0], split="1e3",
                    tokenizer="hf"),
    optimizer=OptimizerConfig(betas=(0.8, 1 / 3), lr=1e-05),
    train=TrainConfig(output="2024-01-01", tensorboard=False),
    deepspeed={"a": {"b": [1, 1e-9, "1E5", None, True]}},
)


def test_saved_file_gives_the_same_configuration(tmp_path):
    save_config(UNUSUAL, tmp_path / "config.yaml")
    assert load_config(["--config", str(tmp_path / "config.yaml")]) == UNUSUAL
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_dictionary_gives_the_same_configuration():
    tree = config_to_dict(UNUSUAL)
    assert config_from_dict(tree) == UNUSUAL
    assert tree["optimizer"]["betas"] == [0.8, 1 / 3]
    assert config_from_dict({}) == Config()


def test_dictionary_is_checked_as_files_are():
    with pytest.raises(UserError, match=r"no setting model\.depth \(in the saved configuration\)"):
        config_from_dict({"model": {"depth": 3}})


def test_a_failing_save_is_told_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    save_config(Config(), path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=r"config\.yaml: No space left on device"):
        save_config(dataclasses.replace(Config(), deepspeed={"a": 1}), path)
    assert load_config(["--config", str(path)]) == Config()


def test_reading_settings_needs_no_torch():
    code = ("import sys; from megatron_xmod.config.load import load_config; load_config([]); "
            "print('torch' in sys.modules)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_layers_lie_over_each_other_and_name_their_place():
    layers = [({"model": {"active_layers": 8}}, "in a.yaml"), ({"model.active_layers": 6, "data.seed": 3}, "in b.yaml")]
    config = config_from_layers(layers)
    assert (config.model.active_layers, config.data.seed) == (6, 3)
    with pytest.raises(UserError, match="in b.yaml.*data.seed") as error:
        config_from_layers([*layers[:1], ({"data.sed": 3}, "in b.yaml")])
    assert not isinstance(error.value, CombinationError)
    with pytest.raises(CombinationError, match="must be an integer"):
        config_from_layers([({"model.routing.A": 0.3}, "in a.yaml")])


def test_an_order_for_fewer_samples_than_the_run_needs_is_refused():
    assert "is 80" in message("--data.samples", "79", "--train.steps", "10", "--train.global_batch_size", "8")
    load_config(["--data.samples", "80", "--train.steps", "10", "--train.global_batch_size", "8"])
