"""Prints what a configuration builds: layout, parameters, FLOPs, memory, pipeline stages. Needs no torch."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from megatron_xmod import flops
from megatron_xmod.config.load import load_config
from megatron_xmod.config.schema import Config
from megatron_xmod.depth import DepthPlan
from megatron_xmod.parallel.cut import cut_stages, imbalance, stage_costs
from megatron_xmod.runtime.entry import run

_DESCRIPTION = f"{__doc__} With --json it prints the numbers only, as one JSON object."


def describe(config: Config) -> dict[str, Any]:
    """The numbers; parameters and FLOPs are explained in `megatron_xmod.flops`."""
    model, length = config.model, config.data.seq_length
    plan = flops.model_plan(model)
    train = flops.train_flops_per_token(model, length)
    stages = config.parallel.pipeline_parallel_size
    costs = flops.layer_flops(model, length)
    bounds = cut_stages(costs, stages)
    return {
        "seq_length": length,
        "layers": plan.layers,
        "dense_layers": plan.dense_layers,
        "sparse_layers": plan.sparse_layers,
        "active_layers": float(plan.active_layers),
        "total_params": flops.total_params(model),
        "active_params": flops.active_params(model),
        "stored_params": flops.stored_params(model),
        "flops_per_token_paper": flops.flops_per_token_paper(model, length),
        "flops_ratio_to_dense": flops.flops_ratio_to_dense(model, length),
        "train_flops_per_token": train,
        "train_flops_ratio_to_dense": train / flops.train_flops_per_token(flops.dense_twin(model), length),
        "state_bytes": flops.state_bytes(config),
        "stage_bounds": bounds,
        "stage_shares": [cost / sum(costs) for cost in stage_costs(costs, bounds)],
        "stage_imbalance": imbalance(costs, bounds),
    }


def layout_lines(plan: DepthPlan) -> list[str]:
    """One line for the prefix and one per group."""
    lines = [f"prefix: {plan.prefix_layers} dense"] if plan.prefix_layers else []
    for group, size in enumerate(plan.groups):
        rounds = " + ".join(f"{count} x {layers}" for layers, count in Counter(plan.rounds(group)).items())
        lines.append(f"group {group}: {size} sparse (rounds: {rounds}) + 1 dense")
    return lines


def report(config: Config) -> str:
    """The description for people."""
    numbers = describe(config)
    plan = flops.model_plan(config.model)
    state = numbers["state_bytes"]
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in state.items())
    share = f", sparse ones on 1/{plan.K} of the tokens" if plan.groups else ""
    lines = [
        *layout_lines(plan),
        "",
        f"layers                {numbers['layers']} = {plan.dense_layers} dense + {plan.sparse_layers} sparse{share}; "
        f"a token passes {numbers['active_layers']:g}",
        f"N                     {_large(numbers['total_params'])}   matrices of the layers, embedding, head",
        f"N_act                 {_large(numbers['active_params'])}   what an average token uses of them",
        f"stored parameters     {_large(numbers['stored_params'])}   with norms, routers, scales, vocabulary padding",
        f"training state        {sum(state.values()) / 2**30:.1f} GiB   {parts}; before sharding, without activations",
        "",
        f"FLOPs per token at sequence length {numbers['seq_length']}:",
        f"phi                   {_large(numbers['flops_per_token_paper'], 'MGT')}   as the paper counts: forward, all "
        "keys, no embedding, no head",
        f"phi / phi_dense       {numbers['flops_ratio_to_dense']:.3f}",
        f"training              {_large(numbers['train_flops_per_token'], 'MGT')}   forward and backward, causal "
        "attention, routers and head included",
        f"training / dense      {numbers['train_flops_ratio_to_dense']:.3f}",
    ]
    if config.parallel.pipeline_parallel_size > 1:
        lines += ["", f"pipeline stages (costliest / mean = {numbers['stage_imbalance']:.3f}):"]
        lines += _stage_lines(_unit_names(plan), numbers["stage_bounds"], numbers["stage_shares"])
    return "\n".join(lines)


def _unit_names(plan: DepthPlan) -> list[str]:
    blocks = [f"block {i}" for i in range(plan.prefix_layers)]
    return ["embedding", *blocks, *(f"group {i}" for i in range(len(plan.groups))), "norm", "head"]


def _stage_lines(names: list[str], bounds: list[int], shares: list[float]) -> list[str]:
    return [f"stage {stage}: {names[bounds[stage]]} to {names[bounds[stage + 1] - 1]}, {share:.1%} of the FLOPs"
            for stage, share in enumerate(shares)]


def _large(number: float, letters: str = "MBT") -> str:
    """Parameters in million, billion, ...; FLOPs in mega, giga, ..."""
    power = max(0, min(2, (len(str(int(number))) - 7) // 3))
    return f"{number / 1000 ** (power + 2):.2f} {letters[power]}"


def main(argv: list[str]) -> None:
    config = load_config([word for word in argv if word != "--json"], _DESCRIPTION)
    print(json.dumps(describe(config), indent=2) if "--json" in argv else report(config))


if __name__ == "__main__":
    run(main)
