import json

import pytest

from megatron_xmod.config.load import save_config
from megatron_xmod.sweep.state import DONE, FAILED, UNFINISHED, WAITING, prepare_folder, read_state, record_failure
from tests.unit.sweep.conftest import leave_finished


@pytest.fixture
def run(plan):
    return plan().runs[0]


def test_from_waiting_to_done(run):
    assert read_state(run).status == WAITING
    save_config(run.config, run.folder / "config.yaml")
    assert read_state(run).status == UNFINISHED
    leave_finished(run)
    state = read_state(run)
    assert state.status == DONE and state.validation[-1]["step"] == 20
    assert state.seconds == pytest.approx(20 * 4 * 64 / 1000)


def test_a_summary_of_a_stopped_run_is_not_done(run):
    leave_finished(run)
    summary = json.loads((run.folder / "summary.json").read_text())
    summary["final"] |= {"finished": False, "step": 12}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    assert read_state(run).status == UNFINISHED
    (run.folder / "summary.json").write_text('{"validation": [')
    assert read_state(run).status == UNFINISHED


def test_a_failure_is_remembered_until_the_next_attempt_or_other_settings(plan):
    run = plan().runs[0]
    record_failure(run, "the disk is full")
    state = read_state(run)
    assert (state.status, state.error) == (FAILED, "the disk is full")
    assert read_state(plan({"optimizer.lr": 0.1}).runs[0]).status == WAITING
    assert prepare_folder(run) is None and read_state(run).status == WAITING


def test_results_of_other_settings_are_no_results_and_are_put_aside(plan):
    run = plan().runs[0]
    leave_finished(run)
    other = plan({"optimizer.lr": 0.1}).runs[0]
    state = read_state(other)
    assert state.status == WAITING and state.changed == ("optimizer.lr is 0.0003 there, 0.1 here",)
    first = prepare_folder(other)
    assert first.endswith(f"{run.name}.old1") and not other.folder.exists()
    leave_finished(run)
    assert prepare_folder(other).endswith(".old2")
    leave_finished(other)
    assert prepare_folder(other) is None and read_state(other).status == DONE
