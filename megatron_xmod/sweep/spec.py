"""What a sweep's YAML file says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from megatron_xmod.config.yaml_text import read_yaml
from megatron_xmod.errors import UserError

Settings = dict[str, Any]  # by full name, or nested


@dataclass(frozen=True)
class SweepSpec:
    """A sweep: every variant x every point of the grid x every budget x every seed.

    Attributes:
        file: Where it was read from.
        output: Folder of everything the sweep makes.
        configs: Configuration files under all runs, later ones win.
        settings: Laid over the files, for all runs.
        variants: Name -> settings laid over that.
        grid: Setting -> values, or a free name -> {label: settings}; all combinations are made.
        seeds: Of the initial weights. The order of the data is data.seed, the same for all runs.
        budget: {flops: C, or a list}: training FLOPs of a run, which give its steps.
        processes: Of each run.
        launcher: local, or slurm (a job array with one task per run).
        jobs: Runs side by side; null: one locally, as many as Slurm starts.
    """

    file: str
    output: str
    configs: list[str] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)
    variants: dict[str, Settings] = field(default_factory=lambda: {"": {}})
    grid: dict[str, list | dict[str, Settings]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [1234])
    budget: dict[str, float | list[float]] | None = None
    processes: int = 1
    launcher: Literal["local", "slurm"] = "local"
    jobs: int | None = None

    @property
    def budgets(self) -> list[float | None]:
        """Training FLOPs of the runs; [None] where their length is train.steps."""
        if self.budget is None:
            return [None]
        flops = self.budget["flops"]
        return [float(C) for C in (flops if isinstance(flops, list) else [flops])]


def read_spec(file: str) -> SweepSpec:
    """Reads and checks a sweep's file, but not yet what its settings mean.

    Raises:
        UserError: it can't be read, or a key is unknown, missing or of the wrong form.
    """
    tree = read_yaml(file)
    _known(file, tree, [f.name for f in fields(SweepSpec) if f.name != "file"])
    if not tree.get("output"):
        raise UserError(f"{file}: output is missing; it names the folder of the sweep.")
    spec = SweepSpec(file=file, **{key: value for key, value in tree.items() if value is not None})
    _check_forms(spec)
    _check_sections(spec)
    return replace(spec, variants={str(name): settings or {} for name, settings in spec.variants.items()})


def _known(file: str, tree: dict, names: list[str], prefix: str = "") -> None:
    for key in tree:
        if key not in names:
            near = get_close_matches(str(key), names, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else "a setting of the runs belongs under settings."
            raise UserError(f"{file}: there is no {prefix}{key}; {hint} A sweep has {', '.join(names)}.")


def _check_forms(spec: SweepSpec) -> None:
    def texts(value) -> bool:
        return isinstance(value, list) and all(isinstance(v, str) for v in value)

    def whole(value, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    forms = {
        "output": (isinstance(spec.output, str), "the path of a folder"),
        "configs": (texts(spec.configs), "a list of files"),
        "settings": (isinstance(spec.settings, dict), "a section of settings"),
        "variants": (_bundles(spec.variants), "names with a section of settings each"),
        "grid": (isinstance(spec.grid, dict) and all(_axis(v) for v in spec.grid.values()),
                 "settings with a list of values each, or names with labelled sections of settings"),
        "seeds": (isinstance(spec.seeds, list) and spec.seeds and all(whole(s, 0) for s in spec.seeds)
                  and len(set(spec.seeds)) == len(spec.seeds), "a list of different whole numbers"),
        "processes": (whole(spec.processes, 1), "a whole number of at least 1"),
        "launcher": (spec.launcher in ("local", "slurm"), "local or slurm"),
        "jobs": (spec.jobs is None or whole(spec.jobs, 1), "a whole number of at least 1"),
    }
    for name, (good, meaning) in forms.items():
        if not good:
            raise UserError(f"{spec.file}: {name} is {getattr(spec, name)!r}; it must be {meaning}.")


def _bundles(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(v, dict | None) for v in value.values())


def _axis(value: Any) -> bool:
    return isinstance(value, list) and bool(value) or _bundles(value)


def _check_sections(spec: SweepSpec) -> None:
    if spec.budget is not None:
        if not isinstance(spec.budget, dict) or "flops" not in spec.budget:
            raise UserError(f"{spec.file}: budget is {spec.budget!r}; write it as 'budget: {{flops: 1e18}}'.")
        _known(spec.file, spec.budget, ["flops"], "budget.")
        flops = spec.budget["flops"]
        values = flops if isinstance(flops, list) else [flops]
        if not values or not all(isinstance(v, int | float) and math.isfinite(v) and v > 0 for v in values):
            raise UserError(f"{spec.file}: budget.flops is {flops!r}; it must be a number above 0, or a list of such.")
    given = {"train.output": "output", "train.seed": "seeds"} | ({"train.steps": "budget"} if spec.budget else {})
    places = {"settings": spec.settings, **{f"variants.{n}": v for n, v in spec.variants.items()}}
    for axis, values in spec.grid.items():
        places |= {f"grid.{axis}.{n}": v for n, v in values.items()} if isinstance(values, dict) else \
            {"grid": {axis: None}}
    for place, settings in places.items():
        for name, key in given.items():
            section, last = name.split(".")
            if name in (settings or {}) or last in ((settings or {}).get(section) or {}):
                raise UserError(f"{spec.file}: {place} has {name}, which follows from {key}. Leave it out.")
