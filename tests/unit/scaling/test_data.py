import gzip

import numpy as np
import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.scaling.data import DenseCurves, read_chinchilla, read_routed, read_xmod
from megatron_xmod.scaling.table import read_table

HEADER = "run,N_act,N,L,K,A,C,loss,status"
DENSE = ["d,1e8,,2048,1,,1e18,3.4,", "d,1e8,,2048,1,,4e18,3.0,ok"]


def write(tmp_path, lines, name="sweep.csv"):
    path = tmp_path / name
    data = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(data.encode()) if name.endswith(".gz") else data.encode())
    return path


def test_bad_rows_are_named_and_left_out(tmp_path):
    lines = [HEADER, *DENSE,
             "a,1e8,2e8,2048,4,1,2e18,3.1,ok",
             "b,1e8,2e8,2048,4,1,2e18,nan,ok",
             "c,1e8,2e8,2048,eight,1,2e18,3.1,ok",
             "a,1e8,2e8,2048,4.0,1,2e18,3.1,ok",
             "e,1e8,2e8,2048,8,1,2e18,3.1,failed",
             "f,1e8,2e8,2048,8,1",
             "g,1e8,2e8,2048,8,1,9e18,3.1,ok",
             "h,1e8,2e8,4096,8,1,2e18,3.1,ok",
             "i,1e8,,2048,8,1,2e18,3.1,ok",
             "j,1e8,2e8,2048,8,1,2e18,-3,ok",
             "k,1e8,2e8,2048,0.5,1,2e18,3,ok"]
    sweep = read_xmod(write(tmp_path, lines))
    assert sweep.loss.tolist() == [3.1] and sweep.x["ratio"].tolist() == [2.0] and sweep.names.tolist() == ["a"]
    reasons = {int(r.split(":")[0].removeprefix("line ")): r for r in sweep.left_out}
    assert sorted(reasons) == list(range(5, 15))
    for line, words in {5: "loss is nan", 6: "K is 'eight', not a number", 7: "duplicate of line 4",
                        8: "status is failed", 9: "fewer fields", 10: "outside the dense curve", 11: "no dense run",
                        12: "N is empty", 13: "loss is -3", 14: "K is 0.5"}.items():
        assert words in reasons[line]


def test_dense_losses_are_read_at_matched_flops(tmp_path):
    sweep = read_xmod(write(tmp_path, [HEADER, *DENSE, "a,1.001e8,2e8,2048,4,1,2e18,3.1,"]))
    assert sweep.x["dense_loss"][0] == pytest.approx(np.sqrt(3.4 * 3.0))  # the middle, on logarithmic axes
    lines = ["N_act,ratio,L,K,A,C,loss,dense_loss,tokens,dense_tokens", "1e8,3,2048,4,1,2e18,3.1,3.25,5e9,4e9"]
    sweep = read_xmod(write(tmp_path, lines))
    assert (sweep.x["dense_loss"][0], sweep.x["D_sparse"][0], sweep.x["D_dense"][0]) == (3.25, 5e9, 4e9)


def test_tokens_of_the_dense_reference_follow_its_flops(tmp_path):
    lines = ["N_act,ratio,L,K,A,C,loss,tokens", "1e8,1,2048,1,1,1e18,3.4,2e9", "1e8,1,2048,1,1,4e18,3.0,8e9",
             "1e8,3,2048,4,1,2e18,3.1,5e9"]
    sweep = read_xmod(write(tmp_path, lines))
    assert (sweep.x["D_sparse"][0], sweep.x["D_dense"][0]) == pytest.approx((5e9, 4e9))


def test_loss_and_tokens_of_the_dense_reference_are_matched_alike(tmp_path):
    lines = ["N_act,ratio,L,K,A,C,loss,tokens", "1e8,1,2048,1,1,1e18,3.4,2e9", "1e8,1,2048,1,1,4e18,3.0,8e9",
             "1.005e8,3,2048,4,1,2e18,3.1,5e9"]
    sweep = read_xmod(write(tmp_path, lines))
    assert sweep.x["D_dense"][0] == pytest.approx(4e9) and sweep.x["dense_loss"][0] == pytest.approx(np.sqrt(3.4 * 3))


def test_dense_curves_follow_a_power_law_and_average_runs():
    C = np.geomspace(1e17, 1e19, 9)
    one = np.ones(18)
    loss = np.concatenate([5 * (C / 1e17) ** -0.05, 5.2 * (C / 1e17) ** -0.05])
    curves = DenseCurves(1e8 * one, 2048 * one, np.tile(C, 2), loss, ["a"] * 9 + ["b"] * 9)
    assert curves.at(1e8, 2048, 3e18) == pytest.approx(5.1 * 30**-0.05, rel=1e-6)
    with pytest.raises(UserError, match="outside the dense curve"):
        curves.at(1e8, 2048, 2e19)


@pytest.mark.parametrize("lines, words", [
    (["N_act,L,K,A,C", "1,2,3,4,5"], "lacks the columns loss"),
    ([HEADER], "no rows"),
    (["N_act,L,K,A,C,loss", "1e8,2048,4,1,1e18,3"], "neither a column N"),
    ([HEADER, "a,1e8,2e8,2048,4,1,2e18,nan,ok"], "no sparse run that can be used: line 2: loss is nan"),
])
def test_useless_tables_are_refused(tmp_path, lines, words):
    with pytest.raises(UserError, match=words):
        read_xmod(write(tmp_path, lines))


def test_files_that_are_no_tables_are_refused(tmp_path):
    with pytest.raises(UserError, match="can't be read"):
        read_table(tmp_path / "absent.csv", ())
    (tmp_path / "broken.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="can't be read"):
        read_table(tmp_path / "broken.csv.gz", ())
    (tmp_path / "binary.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
    with pytest.raises(UserError, match="not a CSV table"):
        read_table(tmp_path / "binary.csv", ())


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    path = tmp_path / "marked.csv"
    path.write_text("run,loss\na,3\n", encoding="utf-8-sig")
    assert read_table(path, ("run", "loss")).rows == [{"run": "a", "loss": "3"}]


def test_chinchilla_leaves_out_the_highest_losses(tmp_path):
    lines = ["Model Size,Training FLOP,loss", "1e9,6e19,2.5", "1e9,6e20,2.2", "1e8,6e17,4.1", "1e9,6e20,2.2", "1e9,,3"]
    sweep = read_chinchilla(write(tmp_path, lines), drop_highest=1)
    assert sweep.loss.tolist() == [2.5, 2.2] and sweep.x["D"].tolist() == [1e10, 1e11]
    assert [reason.split(":")[0] for reason in sweep.left_out] == ["line 6", "line 5", "line 4"]


def test_routed_takes_each_runs_last_step(tmp_path):
    header = "hyper_id,step,loss_validation,num_experts,k,router_type,routing_frequency,dense_parameter_count"
    lines = [header, "0,10,3.0,1,1,Dense,0.5,1e8", "0,20,2.9,1,1,Dense,0.5,1e8", "1,20,2.8,8,1,Hash,0.5,1e8",
             "1,10,3.1,8,1,Hash,0.5,1e8", "2,20,2.7,8,2,Hash,0.5,1e8", "3,20,nan,16,1,Hash,0.5,1e8"]
    found = read_routed(write(tmp_path, lines, "routed.csv.gz"))
    assert list(found) == ["Hash"] and found["Hash"].loss.tolist() == [2.9, 2.8]
    assert found["Hash"].left_out == ["line 7: loss_validation is nan; it must be a positive number"]
    assert read_routed(tmp_path / "routed.csv.gz", step=10)["Hash"].loss.tolist() == [3.0, 3.1]


def test_routed_rows_without_a_step_are_left_out(tmp_path):
    header = "hyper_id,step,loss_validation,num_experts,k,router_type,routing_frequency,dense_parameter_count"
    lines = [header, "0,0,11,1,1,Dense,0.5,1e8", "0,20,2.9,1,1,Dense,0.5,1e8", "1,,2.7,8,1,Hash,0.5,1e8",
             "1,last,2.7,8,1,Hash,0.5,1e8", "1,20,2.8,8,1,Hash,0.5,1e8", "1,-1,2.8,8,1,Hash,0.5,1e8"]
    found = read_routed(write(tmp_path, lines, "routed.csv.gz"))["Hash"]
    assert found.loss.tolist() == [2.9, 2.8]
    assert found.left_out == ["line 4: step is empty", "line 5: step is 'last', not a number",
                              "line 7: step is -1; it must be a number of at least 0"]


def test_the_bootstrap_draws_groups_or_configurations(tmp_path):
    header = "run,group,seed,N_act,ratio,L,K,A,C,loss,dense_loss"
    lines = ["a,{},0,1e8,2,2048,4,1,2e18,3.1,3.2", "b,{},1,1e8,2,2048,4,1,2e18,3.1,3.2",
             "b,{},1,1e8,2,2048,4,1,1e18,3.1,3.2", "c,{},0,1e8,2,2048,8,1,2e18,3.1,3.2"]

    def clusters(*groups):
        rows = [line.format(group) for line, group in zip(lines, groups, strict=True)]
        return np.unique(read_xmod(write(tmp_path, [header, *rows])).clusters, return_inverse=True)[1].tolist()

    assert clusters("", "", "", "") == [0, 0, 0, 1]
    assert clusters("x", "y", "y", "x") == [0, 1, 1, 0]
