"""Checkpoints of a run: DeepSpeed's files, committed by a rename, with a plain description beside them.

    <output>/checkpoints/step_00000100/     layer_*, mp_rank_*, zero_* (DeepSpeed)
                                            checkpoint.json            (settings, step, history)
    <output>/checkpoints/latest             name of the newest

A folder is written as step_….tmp and renamed when every rank has finished and all is on disk; `latest` is replaced
after that. Whatever happens before, the last good checkpoint and `latest` stay as they were.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_xmod.config.load import config_from_dict, config_to_dict
from megatron_xmod.config.schema import Config
from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import sync_folder, write_atomically

FORMAT = 1
_META = "checkpoint.json"


def folder_of(output: str) -> Path:
    return Path(output) / "checkpoints"


def find(output: str) -> Path | None:
    """The newest checkpoint of a run, or None.

    Raises:
        UserError: `latest` names a checkpoint that is not there.
    """
    folder = folder_of(output)
    latest = folder / "latest"
    if not latest.exists():
        return None
    path = folder / latest.read_text().strip()
    if not (path / _META).exists():
        raise UserError(f"{latest} names {path.name}, which is missing or incomplete. Write the name of a complete "
                        f"checkpoint of {folder} into it, or remove it to start anew.")
    return path


def locate(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run's folder or of its checkpoints folder.

    Raises:
        UserError: there is none.
    """
    path = Path(path)
    if (path / _META).exists():
        return path
    found = find(str(path.parent if path.name == "checkpoints" else path))
    if found is None:
        raise UserError(f"{path} holds no checkpoint. Give a run's folder, or one checkpoint in it.")
    return found


def describe(path: Path) -> tuple[Config, dict]:
    """Settings and description of a checkpoint.

    Raises:
        UserError: no readable checkpoint is there.
    """
    try:
        meta = json.loads((path / _META).read_text())
        if meta["format"] != FORMAT:
            raise UserError(f"{path} has checkpoint format {meta['format']}; this version reads format {FORMAT}.")
        return config_from_dict(meta["config"]), meta
    except FileNotFoundError:
        raise UserError(f"{path} holds no checkpoint: {_META} is missing.") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path / _META} can't be read: {error}. Use another checkpoint.") from None


def save(engine, config: Config, step: int, history: list[dict], keep: int) -> Path:
    """Saves the run; every process calls it. Returns the checkpoint's folder.

    Raises:
        UserError: it could not be written; older checkpoints are intact.
    """
    folder = folder_of(config.train.output)
    path, temporary = folder / f"step_{step:08d}", folder / f"step_{step:08d}.tmp"
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        engine.save_checkpoint(str(folder), tag=temporary.name, save_latest=False)
        _flush(temporary)
        dist.barrier()
        if dist.get_rank() == 0:
            _commit(temporary, path, config, step, history)
            _prune(folder, path, keep)
        dist.barrier()
    except (OSError, RuntimeError, UserError) as error:
        if "Connection closed" in str(error) or "Connection reset" in str(error):
            raise  # a peer failed and says why
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"the checkpoint of step {step} could not be written to {folder}: {_reason(error, folder)} "
                        "Earlier checkpoints are intact; free some space and start again to resume.") from None
    return path


def _reason(error: Exception, folder: Path) -> str:
    free = shutil.disk_usage(folder if folder.exists() else folder.parents[1]).free
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{first} ({free / 2**30:.1f} GiB free)."


def _flush(folder: Path) -> None:
    """Brings this node's files to the disk before anything points to them."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _commit(temporary: Path, path: Path, config: Config, step: int, history: list[dict]) -> None:
    layout = {"tensor_parallel_size": config.parallel.tensor_parallel_size,
              "pipeline_parallel_size": config.parallel.pipeline_parallel_size, "world_size": dist.get_world_size()}
    meta = {"format": FORMAT, "step": step, "layout": layout, "validation": history, "config": config_to_dict(config)}
    write_atomically(temporary / _META, json.dumps(meta, indent=2) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    sync_folder(path.parent)
    write_atomically(path.parent / "latest", path.name + "\n")


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Removes what a broken save left and, if `keep` is not 0, all but the newest checkpoints."""
    for leftover in folder.glob("step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    older = sorted(p for p in folder.glob("step_*") if p.name < newest.name)
    for path in older[:max(0, len(older) + 1 - keep)] if keep else ():
        shutil.rmtree(path, ignore_errors=True)


def load(engine, config: Config, path: Path) -> dict:
    """Restores model, optimizer and schedule; every process calls it. Returns the description.

    Raises:
        UserError: the checkpoint is of another architecture or layout, or damaged.
    """
    saved, meta = describe(path)
    _refuse_other_model(config, saved, path)
    _refuse_other_layout(config, meta, path)
    try:
        loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
    except Exception as error:  # noqa: BLE001 - torch and DeepSpeed raise anything on a damaged file
        raise UserError(f"{path} can't be loaded: {str(error).strip().splitlines()[0]}. If it is damaged, write the "
                        f"name of an older checkpoint into {path.parent / 'latest'}.") from error
    if loaded is None or engine.global_steps != meta["step"]:
        raise UserError(f"{path} is incomplete; write the name of an older checkpoint into {path.parent / 'latest'}.")
    return meta


def _refuse_other_model(config: Config, saved: Config, path: Path) -> None:
    differences = _differences(config_to_dict(saved)["model"], config_to_dict(config)["model"], "model")
    if differences:
        raise UserError(f"{path} holds another model: {'; '.join(differences)}. Use its settings, or another "
                        "train.output.")


def _refuse_other_layout(config: Config, meta: dict, path: Path) -> None:
    layout = meta["layout"]
    here = {"tensor_parallel_size": config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": config.parallel.pipeline_parallel_size, "world_size": dist.get_world_size()}
    if layout != here:
        words = ", ".join(f"{name} {layout[name]} (now {here[name]})" for name in here if layout[name] != here[name])
        raise UserError(f"{path} was saved with {words}; resume with the layout it was saved with.")


def _differences(saved: dict, now: dict, prefix: str) -> list[str]:
    found = []
    for name, value in saved.items():
        if isinstance(value, dict):
            found += _differences(value, now[name], f"{prefix}.{name}")
        elif value != now[name]:
            found.append(f"{prefix}.{name} is {value} there, {now[name]} here")
    return found


def inexact_settings(config: Config, saved: Config) -> list[str]:
    """Settings that differ so that the resumed run is not the one it would have been."""
    then, now = config_to_dict(saved), config_to_dict(config)
    found = []
    for topic in ("data", "optimizer"):
        found += _differences(then[topic], now[topic], topic)
    for name in ("steps", "global_batch_size", "seed", "precision"):
        found += _differences({name: then["train"][name]}, now["train"], "train")
    return found
