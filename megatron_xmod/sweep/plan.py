"""From a sweep's file to its runs."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from megatron_xmod.config.deepspeed import gradient_accumulation
from megatron_xmod.config.load import config_from_layers
from megatron_xmod.config.schema import Config
from megatron_xmod.config.yaml_text import read_yaml
from megatron_xmod.data.vocabulary import resolve_vocabulary
from megatron_xmod.errors import CombinationError, UserError
from megatron_xmod.flops import layer_flops, train_flops_per_token
from megatron_xmod.parallel.cut import cut_stages
from megatron_xmod.sweep.identity import config_hash, is_dense
from megatron_xmod.sweep.spec import Settings, SweepSpec


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: variant and seed; of its files.
        variant: What it shares with the runs that differ only in the seed.
        budget: Training FLOPs it was given; None where train.steps was.
        config: Complete: with its folder, its vocabulary and its steps.
    """

    name: str
    variant: str
    seed: int
    budget: float | None
    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.train.output)

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.data.seq_length

    @property
    def flops_per_step(self) -> float:
        """Training FLOPs: forward and backward, causal attention, head and routers included."""
        return self.tokens_per_step * train_flops_per_token(self.config.model, self.config.data.seq_length)

    @property
    def hash(self) -> str:
        return config_hash(self.config)


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep in order, and the combinations that make none, each with its reason."""

    spec: SweepSpec
    runs: list[Run]
    left_out: list[str]


@dataclass(frozen=True)
class _Point:
    """One choice of variant, grid values and budget."""

    variant: str
    parts: tuple[tuple[str, str, Settings], ...]  # key, label, settings
    budget: float | None

    def label(self, dense: bool) -> str:
        """The variant in words; what says nothing about a dense model is left out."""
        shown = [label for key, label, _ in self.parts if not (dense and key.startswith("model.routing."))]
        return "-".join(filter(None, [self.variant, *shown])) or "run"


def make_plan(spec: SweepSpec) -> Plan:
    """All runs. Combinations that can't be built are left out; a variant of which none can be is an error.

    Raises:
        UserError: an unknown setting, a wrong type, a missing file, or nothing to run.
    """
    files = [(read_yaml(file), f"in {file}") for file in spec.configs]
    runs: dict[str, Run] = {}  # by hash: a dense run appears once, whatever the grid of K
    left_out: list[str] = []
    alive: dict[str, str | None] = {}  # variant -> why it has no run so far
    for point in _points(spec):
        try:
            made = [_run(spec, files, point, seed) for seed in spec.seeds]
        except CombinationError as error:
            left_out.append(f"{point.label(False)}: {error}")
            alive.setdefault(point.variant, str(error))
            continue
        alive[point.variant] = None
        for run in made:
            runs.setdefault(run.hash, run)
    for variant, reason in alive.items():
        if reason:
            raise UserError(f"{spec.file}: {f'variant {variant}' if variant else 'the sweep'} can't be built: {reason}")
    # Every variant once before any has its second seed: a sweep cut short is still a comparison.
    planned = _same_order(sorted(runs.values(), key=lambda run: spec.seeds.index(run.seed)))
    _check_names(spec, planned)
    _check_data(planned)
    return Plan(spec, planned, left_out)


def _points(spec: SweepSpec) -> Iterator[_Point]:
    axes = [[(key, *value) for value in _values(key, values, spec.grid)] for key, values in spec.grid.items()]
    for variant in spec.variants:
        for parts in itertools.product(*axes):
            for budget in spec.budgets:
                extra = (("budget", f"C={budget:.4g}", {}),) if len(spec.budgets) > 1 else ()
                yield _Point(variant, (*parts, *extra), budget)


def _values(key: str, values: list | dict[str, Settings], grid: dict) -> Iterator[tuple[str, Settings]]:
    """(label, settings) of each value of an axis."""
    if isinstance(values, dict):
        yield from ((f"{key}={label}", settings or {}) for label, settings in values.items())
        return
    last = key.rpartition(".")[2]
    short = last if sum(other.rpartition(".")[2] == last for other in grid) == 1 else key
    yield from ((f"{short}={_word(value)}", {key: value}) for value in values)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _run(spec: SweepSpec, files: list[tuple[dict, str]], point: _Point, seed: int) -> Run:
    layers = [*files, (spec.settings, f"under settings in {spec.file}"),
              (spec.variants[point.variant], f"in variant {point.variant} of {spec.file}")]
    layers += [(settings, f"in the grid of {spec.file}, {label}") for _, label, settings in point.parts]
    config = resolve_vocabulary(config_from_layers([*layers, ({"train.seed": seed}, "from seeds")]))
    variant = point.label(is_dense(config))
    name = re.sub(r"[^\w.=+-]+", "_", f"{variant}-seed={seed}")
    config = replace(config, train=replace(config.train, output=str(Path(spec.output) / "runs" / name), resume="auto"))
    run = Run(name, variant, seed, point.budget, config)
    if point.budget is not None:
        run = _within_budget(run, point.budget)
    _check_shares(run.config, spec.processes)
    if not run.config.train.eval_batches:
        raise UserError(f"{spec.file}: train.eval_batches is 0, but a sweep compares validation losses.")
    return run


def _within_budget(run: Run, flops: float) -> Run:
    """The steps that C pays for. Dense runs are rounded up, so that their curve reaches the C of every sparse run."""
    steps = flops / run.flops_per_step
    steps = ceil(steps) if is_dense(run.config) else int(steps)
    if steps < 1:
        raise CombinationError(f"budget.flops is {flops:.4g}, but one step takes {run.flops_per_step:.4g} FLOPs.")
    return replace(run, config=replace(run.config, train=replace(run.config.train, steps=steps)))


def _check_shares(config: Config, processes: int) -> None:
    """What a run would refuse once it knows its processes."""
    tensor, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    try:
        if processes % (tensor * stages):
            raise UserError(f"{processes} processes can't be shared by tensor {tensor} x pipeline {stages}.")
        gradient_accumulation(config, processes // (tensor * stages))
        cut_stages(layer_flops(config.model, config.data.seq_length), stages)
    except UserError as error:
        raise CombinationError(str(error)) from error


def _same_order(runs: list[Run]) -> list[Run]:
    """Where runs of one context are of different lengths, the order of the data is made for the longest of them."""
    needed: dict[int, set[int]] = defaultdict(set)
    for run in runs:
        train = run.config.train
        needed[run.config.data.seq_length].add(run.config.data.samples or train.steps * train.global_batch_size)
    return [run if len(needed[run.config.data.seq_length]) == 1 else
            replace(run, config=replace(run.config, data=replace(
                run.config.data, samples=max(needed[run.config.data.seq_length])))) for run in runs]


def _check_names(spec: SweepSpec, runs: list[Run]) -> None:
    seen: dict[str, Run] = {}
    for run in runs:
        if seen.setdefault(run.name, run) is not run:
            raise UserError(f"{spec.file}: two runs would be called {run.name}; give variants and labels names that "
                            "differ in letters and digits.")


def _check_data(runs: list[Run]) -> None:
    for path in dict.fromkeys(path for run in runs for path in run.config.data.paths):
        if not Path(f"{path}.idx").exists():
            raise UserError(f"data.paths: there is no {path}.idx. Paths are given from the folder the sweep is "
                            "started in, without .bin and .idx.")
    if any(not run.config.data.paths for run in runs):
        raise UserError("data.paths is empty; name at least one shard (its path without .bin and .idx).")
