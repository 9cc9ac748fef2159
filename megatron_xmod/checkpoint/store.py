"""Checkpoints of a run: DeepSpeed's files, committed by a rename, with a plain description beside them.

    <output>/checkpoints/step_00000100/     layer_*, mp_rank_*, zero_* (DeepSpeed)
                                            checkpoint.json            (settings, step, history)
    <output>/checkpoints/latest             name of the newest
    <output>/checkpoints/zero_to_*.py       DeepSpeed puts them there

A folder is written as step_….tmp and renamed when every rank has finished and all is on disk; `latest` is replaced
after that. Whatever happens before, the last good checkpoint and `latest` stay as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_xmod.config.load import config_from_dict, config_to_dict
from megatron_xmod.config.schema import Config
from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import sync_folder, write_atomically
from megatron_xmod.runtime.peers import is_peer_lost

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


def find_together(output: str) -> Path | None:
    """The newest checkpoint of a run, the same one on every rank; what a broken save left is removed.

    Raises:
        UserError: on every rank, if the ranks do not see the same checkpoint.
    """
    if dist.get_rank() == 0:
        _remove_leftovers(folder_of(output))
    path = find(output)
    seen = None if path is None else f"{path.name} {hashlib.sha256((path / _META).read_bytes()).hexdigest()[:12]}"
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    others = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if others:
        raise UserError(f"rank 0 sees checkpoint {everyone[0]} in {folder_of(output)}, rank {others[0]} sees "
                        f"{everyone[others[0]]}. Use a shared file system, or wait until it shows the same everywhere.")
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


def save(engine, config: Config, step: int, consumed_samples: int, history: list[dict]) -> Path:
    """Saves the run; every process calls it. Returns the checkpoint's folder.

    Raises:
        UserError: it could not be written; older checkpoints are intact.
    """
    folder = folder_of(config.train.output)
    path, temporary = folder / f"step_{step:08d}", folder / f"step_{step:08d}.tmp"
    try:
        if dist.get_rank() == 0:
            _remove_leftovers(folder)
            temporary.mkdir(parents=True)
        dist.barrier()
        engine.save_checkpoint(str(folder), tag=temporary.name, save_latest=False)
        dist.barrier()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _flush(temporary)  # what this node's ranks have written
        dist.barrier()
        if dist.get_rank() == 0:
            meta = {"format": FORMAT, "step": step, "consumed_samples": consumed_samples, "validation": history,
                    "layout": _layout(config), "config": config_to_dict(config)}
            _commit(temporary, path, meta)
        dist.barrier()
    except (OSError, RuntimeError, UserError) as error:
        if is_peer_lost(error):
            raise
        raise UserError(f"the checkpoint of step {step} could not be written to {folder}: {_reason(error, folder)} "
                        "Earlier checkpoints are intact; free some space and start again to resume.") from None
    if dist.get_rank() == 0:
        _prune(folder, path, config.train.keep_checkpoints)
    return path


def _layout(config: Config) -> dict:
    """What the files of a checkpoint are cut and shaped by."""
    parallel = config.parallel
    return {"processes": dist.get_world_size(), "parallel.tensor_parallel_size": parallel.tensor_parallel_size,
            "parallel.pipeline_parallel_size": parallel.pipeline_parallel_size,
            "parallel.zero_stage": parallel.zero_stage, "train.precision": config.train.precision,
            "optimizer.name": config.optimizer.name}


def _reason(error: Exception, folder: Path) -> str:
    free = shutil.disk_usage(folder if folder.exists() else folder.parents[1]).free
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{first} ({free / 2**30:.1f} GiB free)."


def _flush(folder: Path) -> None:
    """Brings files to the disk before anything points to them."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _commit(temporary: Path, path: Path, meta: dict) -> None:
    write_atomically(temporary / _META, json.dumps(meta, indent=2) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    sync_folder(path.parent)
    write_atomically(path.parent / "latest", path.name + "\n")


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob("step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Removes all but the newest checkpoints, if `keep` is not 0."""
    older = sorted(p for p in folder.glob("step_*") if p.name < newest.name)
    for path in older[:max(0, len(older) + 1 - keep)] if keep else ():
        shutil.rmtree(path, ignore_errors=True)


def load(trainable, config: Config, path: Path) -> dict:
    """Restores model, optimizer and schedule; every process calls it. Returns the description.

    The state comes from the checkpoint, the optimizer's settings from the configuration: a lower learning rate takes
    effect.

    Raises:
        UserError: the checkpoint is of another architecture or layout, or damaged.
    """
    saved, meta = describe(path)
    differences = _differences(config_to_dict(saved)["model"], config_to_dict(config)["model"], "model")
    if differences:
        raise UserError(f"{path} holds another model: {'; '.join(differences)}. Use its settings, or another "
                        "train.output.")
    differences = _differences(meta["layout"], _layout(config), "")
    if differences:
        raise UserError(f"{path} was saved in another layout: {'; '.join(differences)}. Resume with the layout it was "
                        "saved with, or use another train.output.")
    engine = trainable.engine
    settings = [{k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups]
    base_lrs = list(engine.lr_scheduler.base_lrs)
    try:
        loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
    except Exception as error:  # noqa: BLE001 - torch and DeepSpeed raise anything on a damaged file
        raise UserError(f"{path} can't be loaded: {str(error).strip().splitlines()[0]}. If it is damaged, write the "
                        f"name of an older checkpoint into {path.parent / 'latest'}.") from error
    if loaded is None or engine.global_steps != meta["step"]:
        raise UserError(f"{path} is incomplete; write the name of an older checkpoint into {path.parent / 'latest'}.")
    _put_settings(engine, settings, base_lrs)
    return meta


def _put_settings(engine, settings: list[dict], base_lrs: list[float]) -> None:
    """The configured settings in place of those that came with the checkpoint."""
    scheduler = engine.lr_scheduler
    scheduler.base_lrs = base_lrs
    for group, wanted, base, factor in zip(engine.basic_optimizer.param_groups, settings, base_lrs,
                                           scheduler.lr_lambdas, strict=True):
        group.update(wanted, lr=base * factor(scheduler.last_epoch))
    scheduler._last_lr = [group["lr"] for group in engine.basic_optimizer.param_groups]


def _differences(saved: dict, now: dict, prefix: str) -> list[str]:
    found = []
    for name, value in saved.items():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(value, dict):
            found += _differences(value, now[name], full)
        elif value != now[name]:
            found.append(f"{full} is {value} there, {now[name]} here")
    return found


def inexact_settings(config: Config, saved: Config) -> list[str]:
    """Settings that differ so that the resumed run is not the one it would have been."""
    then, now = config_to_dict(saved), config_to_dict(config)
    found = []
    for topic in ("data", "optimizer"):
        found += _differences(then[topic], now[topic], topic)
    for name in ("steps", "global_batch_size", "seed"):
        found += _differences({name: then["train"][name]}, now["train"], "train")
    return found
