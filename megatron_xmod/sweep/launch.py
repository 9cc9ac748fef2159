"""One run as processes of its own."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

from megatron_xmod.config.load import save_config
from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import write_errors
from megatron_xmod.sweep.plan import Run
from megatron_xmod.sweep.spec import SweepSpec
from megatron_xmod.sweep.state import UNFINISHED, State, prepare_folder, read_state, record_failure

PROGRAM = Path(__file__).parents[2] / "pretrain_xmod.py"
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_FOR_A_SAVE = 120.0  # that a run whose sweep was killed still takes to save and end
_ERROR = re.compile(r"(?:^|\] )error: (.*)")
_EXCEPTION = re.compile(r"^([\w.]*(?:Error|Exception|Interrupt)\b.*)")


def config_file(spec: SweepSpec, run: Run) -> Path:
    return Path(spec.output) / "configs" / f"{run.name}.yaml"


def command(spec: SweepSpec, run: Run, environment: MutableMapping[str, str]) -> list[str]:
    """What starts the processes of a run: srun inside a Slurm job, torchrun, or just Python."""
    program = ["-u", str(PROGRAM), "--config", str(config_file(spec, run))]
    if _in_slurm(spec, environment):
        python = shlex.split(environment.get("XMOD_PYTHON", sys.executable))
        return ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={environment.get('SLURM_CPUS_PER_TASK', '1')}",
                *python, *program]
    if spec.processes > 1:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                str(spec.processes), *program[1:]]
    return [sys.executable, *program]


def _in_slurm(spec: SweepSpec, environment: MutableMapping[str, str]) -> bool:
    return spec.launcher == "slurm" and "SLURM_JOB_ID" in environment


def slot_environment(spec: SweepSpec, slot: int, base: MutableMapping[str, str], gpus: list[str]) -> dict[str, str]:
    """Variables of the runs in a slot: its own GPUs where there are any, its share of the cores where not set.

    Args:
        slot: 0 to jobs - 1.
        gpus: Of this machine, as CUDA_VISIBLE_DEVICES names them.
    """
    jobs, each = spec.jobs or 1, spec.processes
    made = {**base, "PYTHONUNBUFFERED": "1"}
    if _in_slurm(spec, base):
        return made
    made.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (jobs * each))))
    if gpus:
        if len(gpus) < jobs * each:
            raise UserError(f"{jobs} jobs x {each} processes need {jobs * each} GPUs, but there are {len(gpus)}. "
                            "Lower jobs or processes, or set train.device to cpu.")
        made["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * each:(slot + 1) * each])
    return made


def machine_gpus(environment: MutableMapping[str, str]) -> list[str]:
    """Names of the NVIDIA GPUs that may be used here."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(found.iterdir())] if found.is_dir() else []


class Attempt:
    """One attempt at a run. `stop` may be called from another thread or a signal handler."""

    def __init__(self, spec: SweepSpec, run: Run, environment: dict[str, str]):
        self.spec, self.run, self.environment = spec, run, environment
        self._process: subprocess.Popen | None = None
        self._stopped = False

    def stop(self) -> None:
        """Asks the run to save and end."""
        self._stopped = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1 if _in_slurm(self.spec, self.environment) else signal.SIGTERM)

    def __call__(self, hear: Callable[[str], None]) -> State:
        """Runs to the end and returns the state that the folder is then in.

        Args:
            hear: Called with each line that the run prints.
        """
        run = self.run
        if not _wait_until_free(run.folder):
            return State(UNFINISHED, error="another job is running in its folder")
        aside = prepare_folder(run)
        if aside:
            hear(f"its settings have changed; the run with the old ones is now {aside}")
        save_config(run.config, config_file(self.spec, run))
        with write_errors(run.folder):
            run.folder.mkdir(parents=True, exist_ok=True)
        code, last = self._listen(hear)
        if code and not self._stopped:
            record_failure(run, last)
        return read_state(run)

    def _listen(self, hear: Callable[[str], None]) -> tuple[int, str]:
        """Exit code, and the line that says best what went wrong."""
        words = command(self.spec, self.run, self.environment)
        tail: deque[str] = deque(maxlen=400)
        file = self.run.folder / "log.txt"
        with write_errors(file), open(file, "ab") as log:
            log.write(f"$ {shlex.join(words)}\n".encode())
            log.flush()
            begin = log.tell()
            # Not a pipe: the run can still print, and save, when the sweep is killed. A session of its own: Ctrl-C
            # reaches the sweep alone, which asks the run to save.
            self._process = subprocess.Popen(words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=subprocess.STDOUT, start_new_session=True)
        if self._stopped:
            self.stop()
        for line in _follow(file, begin, self._process):
            hear(line)
            tail.append(line.strip())
        return self._process.returncode, error_line(list(tail), self._process.returncode)


def _follow(file: Path, begin: int, process: subprocess.Popen) -> Iterator[str]:
    """Whole lines that a process adds to a file, until it ends."""
    rest = b""
    with open(file, "rb") as stream:
        stream.seek(begin)
        while True:
            ended = process.poll() is not None  # asked first: what it wrote before its end is then there to read
            *lines, rest = (rest + stream.read()).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if ended:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if rest:
        yield rest.decode(errors="replace")


def error_line(lines: list[str], code: int) -> str:
    """The last message of ours, else the last exception, else the last line."""
    for pattern in (_ERROR, _EXCEPTION):
        for line in reversed(lines):
            found = pattern.search(line)
            if found:
                return found.group(1)
    last = next((line for line in reversed(lines) if line), "it printed nothing")
    killed = f"killed by {signal.Signals(-code).name}; " if code < 0 else f"exit code {code}; "
    return f"{killed}last line: {last}"


def _wait_until_free(folder: Path) -> bool:
    """Waits while a job that an earlier sweep has left behind still saves. False if it is there to stay."""
    until = time.monotonic() + _SECONDS_FOR_A_SAVE
    while _is_taken(folder / ".job"):
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
    return True


def _is_taken(file: Path) -> bool:
    if not file.exists():
        return False
    with open(file, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
