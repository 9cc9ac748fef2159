import importlib.util
import json
import re
from pathlib import Path

import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.scaling import data
from megatron_xmod.scaling.fitted import read_law
from megatron_xmod.scaling.law import CANDIDATE, PUBLISHED
from megatron_xmod.scaling.recovery import NOISE, outside_grid, paper_grid, sweep_csv

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data" / "scaling"
CHINCHILLA, ROUTED = DATA / "chinchilla_svg_extracted.csv", DATA / "routed_lm_curves.csv.gz"

needs_data = pytest.mark.skipif(not DATA.exists(), reason="../shared/data/scaling is absent")


@pytest.fixture
def fit_law(capsys, tmp_path):
    spec = importlib.util.spec_from_file_location("fit_law", ROOT / "tools" / "fit_law.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def fit(law, data, *words):
        path = tmp_path / "law.json"
        module.main([law, "--data", str(data), "--json", str(path), *words])
        return json.loads(path.read_text()), capsys.readouterr().out
    return fit


def report_is_whole(folder: Path) -> str:
    """Every picture that the report names is there, and the other way round."""
    text = (folder / "report.md").read_text()
    named = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert sorted(named) == sorted(path.name for path in folder.glob("*.png")) and named
    assert all((folder / name).stat().st_size > 5000 for name in named)
    return text


@needs_data
@pytest.mark.parametrize("loss, reference", [
    ("huber", {"A": 477.83, "B": 2143.42, "E": 1.81722, "alpha": 0.34731, "beta": 0.36717}),
    ("l1", {"A": 482.01, "B": 2085.43, "E": 1.81686, "alpha": 0.34781, "beta": 0.36585}),
])
def test_chinchilla(fit_law, loss, reference):
    saved, _ = fit_law("chinchilla", CHINCHILLA, "--loss", loss, "--bootstrap", "0")
    assert {name: saved[name] for name in reference} == pytest.approx(reference, rel=5e-3)
    assert saved["scores"]["runs"] == 240 and len(saved["left_out"]) == 5


@needs_data
def test_chinchilla_with_all_points_and_bootstrap_intervals(fit_law, tmp_path):
    saved, _ = fit_law("chinchilla", CHINCHILLA, "--drop-highest", "0", "--bootstrap", "0")
    reference = {"A": 495.7, "B": 12846, "E": 1.8913, "alpha": 0.3493, "beta": 0.4530}
    assert {name: saved[name] for name in reference} == pytest.approx(reference, rel=5e-3)
    saved, text = fit_law("chinchilla", CHINCHILLA, "--report", str(tmp_path / "report"))
    ends = {"A": (292, 730), "E": (1.770, 1.871), "alpha": (0.318, 0.373), "beta": (0.334, 0.414)}
    for name, interval in ends.items():
        assert saved["intervals"][name] == pytest.approx(interval, rel=0.1)
    assert saved["bootstraps"] == 1000 and "| alpha     | 0.34731 |" in text
    assert "# Chinchilla's law" in report_is_whole(tmp_path / "report")


@needs_data
def test_routed_models(fit_law, tmp_path):
    saved, _ = fit_law("routed", ROUTED, "--bootstrap", "20", "--report", str(tmp_path / "report"))
    reference = {"S-Base": (-0.084, -0.123, 0.010, 1.122), "RL-R": (-0.084, -0.128, 0.012, 1.114),
                 "Hash": (-0.089, -0.146, 0.013, 1.173)}
    assert set(saved) == set(reference)
    for router, values in reference.items():
        assert [saved[router][name] for name in "abcd"] == pytest.approx(values, rel=0.1)
        assert saved[router]["rmse"] <= 0.0035 and saved[router]["E_max"] > saved[router]["E_start"] > 0
    report_is_whole(tmp_path / "report")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "sweep.csv"
    lines = sweep_csv(paper_grid() + outside_grid(), NOISE, 0).splitlines()
    lines += [lines[5], lines[6].replace("run5", "other").replace(lines[6].split(",")[7], "nan"), "broken,1"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_xmod_sweep_from_csv_to_report(fit_law, sweep, tmp_path):
    saved, text = fit_law("xmod", sweep, "--bootstrap", "20", "--report", str(tmp_path / "report"),
                          "--hold-out", "L=65536", "--hold-out", "N_act=1.65e9")
    assert saved["law"] == "xmod" and saved["scores"]["runs"] == 109 and saved["scores"]["rmse"] < 1.1 * NOISE
    assert saved["outside"]["runs"] == 9 and saved["outside"]["rmse"] < 2 * NOISE
    assert not saved["profiles"]["rho_A"]["identified"] and "NOT IDENTIFIED" in text
    assert saved["profiles"]["eta_L"]["identified"]
    rmse = {name: rival["rmse"] for name, rival in saved["rivals"].items()}
    assert rmse["candidate"] <= rmse["xmod"] <= rmse["xmod, two-stage"] < rmse["log_linear"]
    held = saved["held_out"]
    assert all(held[v]["joint"]["runs"] == held[v]["two-stage"]["runs"] for v in ("L", "A", "N_act"))
    assert held["L"]["joint"]["rmse"] <= held["L"]["two-stage"]["rmse"] < 2 * NOISE
    assert saved["regret"]["held_out"] and 0 <= saved["regret"]["mean"] <= saved["regret"]["largest"] < 0.05
    assert [reason.split(":")[0] for reason in saved["left_out"]] == ["line 122", "line 121", "line 120"]
    assert "a duplicate of line 6" in text and "loss is nan" in text
    assert "Whole groups held out" in report_is_whole(tmp_path / "report")
    law = read_law(tmp_path / "law.json")
    assert len(law.draws) == 20 and law.domain["K"] == (2, 24) and law.stride_domain["N_act"] == (165e6, 165e6)


def test_exponents_can_be_held_and_other_laws_fitted(fit_law, tmp_path):
    path = tmp_path / "small.csv"
    path.write_text(sweep_csv([cell for cell in paper_grid() if cell[0] == 556e6] + [(556e6, 2048, 4, 2.0)], 0.0, 0))
    with pytest.raises(UserError, match="eta_N needs runs at 2 or more values of N_act, but there are runs at 1"):
        fit_law("xmod", path, "--form", "base")
    saved, text = fit_law("xmod", path, "--form", "base", "--fix", "eta_N=0.07784", "--bootstrap", "0")
    assert saved["eta_N"] == 0.07784
    assert saved["rho_L"] == pytest.approx(0.48494, rel=1e-3) and saved["u"] == pytest.approx(0.93519, rel=1e-3)
    assert saved["left_out"] == ["run61: A is 2, and the law base is for A = 1"] and "z" not in saved
    path.write_text(sweep_csv([cell for cell in paper_grid() if cell[0] == 556e6], 0.0, 0))
    with pytest.raises(UserError, match="fit --form base"):
        fit_law("xmod", path, "--fix", "eta_N=0.07784")


def test_too_few_runs_are_refused_with_the_number_needed(fit_law, tmp_path):
    path = tmp_path / "few.csv"
    path.write_text(sweep_csv(paper_grid()[::12], 0.0, 0))
    with pytest.raises(UserError, match="10 parameters to fit needs at least 11 runs, but 10 can be used"):
        fit_law("xmod", path)
    path.write_text(sweep_csv([cell for cell in paper_grid() if cell[0] == 298e6], 0.0, 0))
    with pytest.raises(UserError, match="10 parameters to fit needs at least 11 runs, but 8 can be used"):
        fit_law("xmod", path)
    path.write_text(sweep_csv([cell for cell in paper_grid() if cell[:2] == (556e6, 2048)], 0.0, 0))
    with pytest.raises(UserError, match="eta_N .* values of N_act.*; eta_L .* values of L.*; rho_A .*Add runs, or hold "
                       "with --fix eta_N=VALUE --fix eta_L=VALUE --fix rho_A=VALUE, or fit --form base"):
        fit_law("xmod", path)


@pytest.mark.parametrize("words, message", [
    (("--fix", "eta_Q=1"), "has the exponents eta_N"),
    (("--fix", "rho_A=0"), "--fix rho_A=0 is out of range: rho_A must be from 0.001 to 5"),
    (("--fix", "rho_A=nan"), "--fix rho_A=nan is out of range"),
    (("--hold-out", "foo=3"), "runs are kept out by N_act, L, K, A, C, not by 'foo'"),
    (("--fix", "eta_N"), "must be NAME=VALUE"),
    (("--hold-out", "L=7"), "matches no run; L takes the values 2048"),
    (("--bootstrap", "-1"), "--bootstrap is -1"),
    (("--seed", "-1"), "--seed is -1; it must be 0 or more"),
])
def test_wrong_options_are_refused(fit_law, sweep, words, message):
    with pytest.raises(UserError, match=message):
        fit_law("xmod", sweep, *words)


def test_the_help_names_the_columns(fit_law, capsys):
    with pytest.raises(SystemExit):
        fit_law("xmod", "any.csv", "--help")
    text = capsys.readouterr().out.split("columns of the table:")[1]
    assert all(name in text for name in (*data._XMOD, "N (", "ratio", "dense_loss", *data._SAME_RUN, "group", "status",
                                         "tokens", "dense_tokens"))


def test_a_negative_number_of_losses_is_refused(fit_law, tmp_path):
    with pytest.raises(UserError, match="--drop-highest is -3; it must be 0 or more"):
        fit_law("chinchilla", tmp_path / "any.csv", "--drop-highest", "-3")


def test_what_is_no_number_is_null_in_the_saved_file(fit_law, tmp_path):
    path = tmp_path / "small.csv"
    path.write_text(sweep_csv([cell for cell in paper_grid() if cell[0] == 556e6], NOISE, 0))
    saved, _ = fit_law("xmod", path, "--form", "base", "--fix", "eta_N=0.07784", "--bootstrap", "0",
                       "--hold-out", "K=3")
    assert saved["outside"]["runs"] == 1 and saved["outside"]["r2"] is None
    assert "NaN" not in (tmp_path / "law.json").read_text()


def test_a_gain_by_compute_needs_several_budgets(fit_law, sweep, tmp_path):
    with pytest.raises(UserError, match="kappa needs runs at 2 or more values of C at the same N_act"):
        fit_law("xmod", sweep, "--form", "gain_by_compute")
    law = {"law": "gain_by_compute", **PUBLISHED, "scores": {"rmse": 0.01}, "stride_domain": {},
           "domain": {"N_act": [1e8, 1e9], "L": [1024, 65536], "K": [2, 24], "A": [1, 5], "C": [1e19, 1e20]}}
    path = tmp_path / "law.json"

    def read(kappa, others=(0.1,), **more):
        draws = [PUBLISHED | {"kappa": k} for k in others]
        path.write_text(json.dumps(law | {"kappa": kappa, "draws": draws} | more))
        return read_law(path)

    assert read(0.1).params["kappa"] == 0.1
    assert read(-1.0, (-1.0,), fixed={"kappa": -1.0}).params["kappa"] == -1
    for words in ({"kappa": -1.0}, {"kappa": 0.1, "others": (-1.0, -1.0, 0.1)},
                  {"kappa": 0.1, "profiles": {"kappa": {"from": -1.0, "to": 0.4, "identified": False}}}):
        with pytest.raises(UserError, match="do not tell how the gain grows with compute"):
            read(**words)


def test_the_candidate_is_held_against_the_law_inside_it(fit_law, tmp_path):
    path = tmp_path / "fewer.csv"
    path.write_text(sweep_csv(paper_grid()[::2], NOISE, 0))
    saved, text = fit_law("xmod", path, "--form", "candidate", "--bootstrap", "0")
    assert saved["rivals"]["candidate"]["rmse"] <= saved["rivals"]["xmod"]["rmse"]
    ends = [e.name for e in CANDIDATE.exponents if saved[e.name] in (e.low, e.high)]
    assert ("At the end of the search: " in text) == bool(ends) and all(f"{name} = " in text for name in ends)
