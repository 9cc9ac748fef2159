"""`run` ends the process, so each case is one."""

import os
import subprocess
import sys
import time

import pytest

PROGRAM = """
import atexit, sys, threading, time
from megatron_xmod.errors import UserError
from megatron_xmod.runtime import entry
{before}
def main(arguments):
    {body}
entry.run(main)
"""


def run_program(body: str, rank: str | None = None, before: str = "") -> subprocess.CompletedProcess:
    """Runs a program whose main function has this body."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    if rank is not None:
        environment["RANK"] = rank
    return subprocess.run([sys.executable, "-c", PROGRAM.format(before=before, body=body), "--first", "word"],
                          capture_output=True, text=True, timeout=60, env=environment)


def test_good_end_is_0_and_prints_everything():
    done = run_program("print(arguments, end='')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "['--first', 'word']", "")


def test_user_error_is_one_message():
    done = run_program("raise UserError('the shard is truncated.')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: the shard is truncated.\n")


def test_own_mistake_keeps_its_traceback():
    done = run_program("{}['key']")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "KeyError: 'key'" in done.stderr


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:4711", "recvValue failed on SocketImpl"])
def test_lost_peer_is_no_traceback(text):
    done = run_program(f"raise RuntimeError({text!r})")
    assert done.returncode == 1
    assert "lost contact" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("body", "status"), [("raise KeyboardInterrupt", 130), ("sys.exit(2)", 2), ("sys.exit()", 0)])
def test_status_of_other_ends(body, status):
    done = run_program(body)
    assert (done.returncode, done.stderr) == (status, "")


def test_other_ranks_say_who_they_are_and_wait_for_rank_0():
    program = {"body": "raise UserError('no.')",
               "before": "entry.time.sleep = lambda seconds: print('waited', seconds >= 1, file=sys.stderr)"}
    assert run_program(**program, rank="1").stderr == "waited True\n[rank 1] error: no.\n"
    assert run_program(**program, rank="0").stderr == "error: no.\n"


def test_nothing_holds_the_end_up():
    started = time.monotonic()
    done = run_program("threading.Thread(target=time.sleep, args=(50,)).start(); raise UserError('stop.')",
                       before="atexit.register(time.sleep, 50)")
    assert (done.returncode, done.stderr) == (1, "error: stop.\n")
    assert time.monotonic() - started < 30
