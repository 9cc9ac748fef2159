import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_xmod.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "describe_model.py"
CONFIGS = ROOT / "examples" / "configs"

# X-MoD (arXiv 2609.34212): layers; N and phi/phi_dense of table 1, phi of table 6. The cells that the count does not
# give, for which test_flops.py says what it gives, are None.
LAYERS = {"dense": 28, "mod": 49, "a4k8": 161, "a3k16": 298, "a1k16": 208}
SIZES = ("165m", "298m", "556m", "936m", "1.65b")
PRINTED = {
    ("556m", "dense"): ("0.54", "1.00", "8.4e+09"), ("556m", "mod"): ("0.87", "0.92", "7.7e+09"),
    ("556m", "a4k8"): ("2.64", "0.47", "3.9e+09"), ("556m", "a3k16"): ("4.79", "0.46", "3.9e+09"),
    ("936m", "dense"): (None, "1.00", "9.0e+09"), ("936m", "mod"): ("1.48", "0.92", "8.3e+09"),
    ("936m", "a4k8"): ("4.52", "0.51", "4.6e+09"), ("936m", "a3k16"): ("8.24", "0.50", "4.5e+09"),
    ("1.65b", "dense"): (None, "1.00", "1.0e+10"), ("1.65b", "mod"): ("2.67", "0.93", "9.6e+09"),
    ("1.65b", "a4k8"): ("8.31", "0.57", "5.9e+09"), ("1.65b", "a3k16"): (None, "0.56", "5.8e+09"),
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("describe_model", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(size: str, variant: str) -> list[str]:
    paths = (CONFIGS / "size" / f"{size}.yaml", CONFIGS / "variant" / f"{variant}.yaml")
    return [word for path in paths for word in ("--config", str(path))]


@pytest.mark.parametrize("variant", LAYERS)
@pytest.mark.parametrize("size", SIZES)
def test_the_25_models_of_the_paper(tool, capsys, size, variant):
    tool.main([*files(size, variant), "--json"])
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["seq_length"], numbers["layers"], numbers["active_layers"]) == (32768, LAYERS[variant], 28)
    label = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert 1.02 < label / numbers["active_params"] < 1.025
    params, ratio, phi = PRINTED.get((size, variant), (None, None, None))
    assert params in (None, f"{numbers['total_params'] / 1e9:.2f}")
    assert ratio in (None, f"{numbers['flops_ratio_to_dense']:.2f}")
    assert phi in (None, f"{numbers['flops_per_token_paper']:.1e}")


def test_examples_train_on_the_papers_tokens_per_step():
    for size in SIZES:
        settings = yaml.safe_load((CONFIGS / "size" / f"{size}.yaml").read_text())
        assert settings["train"]["global_batch_size"] * settings["data"]["seq_length"] == 2.5 * 2**20


def test_a_variant_only_changes_the_depth():
    for variant in LAYERS:
        settings = yaml.safe_load((CONFIGS / "variant" / f"{variant}.yaml").read_text())
        assert settings.keys() == {"model"}
        assert settings["model"].keys() <= {"prefix_layers", "routing"}


def test_json_has_the_agreed_keys(tool, capsys):
    tool.main(["--json"])
    assert json.loads(capsys.readouterr().out).keys() >= {
        "layers", "total_params", "active_params", "flops_per_token_paper", "flops_ratio_to_dense",
        "train_flops_per_token"}


def test_overrides_win(tool, capsys):
    tool.main([*files("165m", "a4k8"), "--model.routing.A", "3", "--model.routing.K", "16", "--json"])
    assert json.loads(capsys.readouterr().out)["layers"] == LAYERS["a3k16"]


def test_report_for_people(tool, capsys):
    tool.main(files("936m", "a4k8"))
    text = capsys.readouterr().out
    assert "prefix: 4 dense\ngroup 0: 24 sparse (rounds: 3 x 8) + 1 dense\n" in text
    assert text.count("group ") == 5 and "stage" not in text
    for expected in ("161 = 9 dense + 152 sparse", "4.52 B", "914.08 M", "4.57 G", "0.506", "9.60 G", "0.589"):
        assert expected in text


def test_last_round_may_be_shorter(tool, capsys):
    tool.main(["--model.active_layers", "7", "--model.prefix_layers", "1", "--model.routing.A", "2.5",
               "--model.routing.K", "8"])
    assert "rounds: 2 x 8 + 1 x 4" in capsys.readouterr().out


def test_pipeline_stages_are_shown(tool, capsys):
    tool.main([*files("936m", "a4k8"), "--parallel.pipeline_parallel_size", "4"])
    text = capsys.readouterr().out
    assert "stage 0: embedding to block 3, 23.6% of the FLOPs" in text
    assert "stage 3: group 4 to head" in text and "costliest / mean = 1.181" in text


@pytest.mark.parametrize(("argv", "expected"), [
    (["--model.seq_length", "8"], "did you mean data.seq_length?"),
    (["--model.routing.A", "3.95"], "A*K must be an integer"),
    (["--parallel.pipeline_parallel_size", "99"], "work: 1 to 9."),
    (["--model.vocab_size", "null"], "model.vocab_size"),
])
def test_mistakes_are_told(tool, capsys, argv, expected):
    with pytest.raises(UserError) as error:
        tool.main(argv)
    assert expected in str(error.value) and not capsys.readouterr().out


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *argv], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_as_a_program():
    assert json.loads(run(*files("556m", "mod"), "--json").stdout)["layers"] == 49
    helped = run("--help")
    assert helped.returncode == 0 and "--json" in helped.stdout and "--model.routing.K K" in helped.stdout


def test_a_mistake_is_one_line_and_a_status():
    ended = run("--model.seq_length", "8")
    assert ended.returncode == 1 and not ended.stdout
    assert ended.stderr.count("\n") == 1 and "did you mean data.seq_length?" in ended.stderr
