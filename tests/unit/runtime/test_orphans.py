import os
import select
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

RANK = ("import os, time; from megatron_xmod.runtime.orphans import end_with_launcher; end_with_launcher(); "
        "print(os.getpid(), flush=True); time.sleep(100)")
LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[2:])"


def ends_when_killed(launchers: list[str], seconds: float) -> bool:
    """Whether a rank ends within this time after the first of its launchers is killed; each starts the next."""
    command = [sys.executable, "-c", RANK]
    for name in reversed(launchers):
        command = [sys.executable, "-c", LAUNCHER, name, *command]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rank = int(first.stdout.readline())
    first.kill()
    ended, _, _ = select.select([first.stdout], [], [], seconds)  # the rank holds the other end of the pipe
    if not ended:
        os.kill(rank, signal.SIGKILL)
    first.communicate()
    return bool(ended)


@pytest.mark.parametrize("launchers", [["bin/torchrun"], ["torch.distributed.run"], ["deepspeed.launcher.launch"],
                                       ["bin/deepspeed", "deepspeed.launcher.launch"]], ids="+".join)
def test_rank_ends_with_its_launcher(launchers):
    assert ends_when_killed(launchers, seconds=20)


def test_rank_outlives_a_shell():
    assert not ends_when_killed(["bash"], seconds=2)
