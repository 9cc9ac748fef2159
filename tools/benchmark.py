"""Times training steps of several variants in turn, and says how much of the speed that their FLOPs promise they reach.

python tools/benchmark.py --config examples/configs/size/165m.yaml --variants dense mod soft:a4k8 exclusive:a4k8 \\
    --seq-length 4096 --steps 7 --json benchmark.json --model.active_layers 12
"""

import argparse
import shlex
import sys
from pathlib import Path

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.entry import run


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="Other options are overrides of settings: --model.active_layers 12")
    add = parser.add_argument
    add("--config", action="append", required=True, metavar="FILE", help="configuration file of the size")
    add("--variants", nargs="+", default=["dense", "mod", "soft:a4k8", "exclusive:a4k8", "exclusive:a3k16"],
        metavar="[MODE:]NAME",
        help="aAkK for any A and K, or files of examples/configs/variant; the mode is soft or exclusive")
    add("--seq-length", type=int, default=4096, help="tokens per sequence (default %(default)s)")
    add("--batch", type=int, default=1, help="sequences per micro-batch (default %(default)s)")
    add("--accumulation", type=int, default=1, help="micro-batches per step (default %(default)s)")
    add("--steps", type=int, default=7, help="steps that count (default %(default)s)")
    add("--warm-up", type=int, default=2, help="steps before them (default %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (default %(default)s)")
    add("--dtype", choices=("fp32", "bf16"), help="default: bf16 on a GPU, fp32 on the CPU")
    add("--peer", nargs="+", choices=("hf", "hf:eager"), default=[],
        help="also time the dense shape in transformers, with SDPA or its eager attention")
    add("--json", type=Path, metavar="FILE", help="save the rows here, and a Markdown table beside it")
    add("--trace", type=Path, metavar="FOLDER", help="write a profiler trace of a step of each variant")
    options, overrides = parser.parse_known_args(arguments)
    for name, lowest in (("seq_length", 1), ("batch", 1), ("accumulation", 1), ("steps", 1), ("warm_up", 1)):
        if getattr(options, name) < lowest:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least {lowest}.")
    if len(set(options.variants)) < len(options.variants):
        raise UserError("--variants names a variant twice.")
    return options, overrides


def main(arguments: list[str]) -> None:
    options, overrides = parse(arguments)

    import torch

    from megatron_xmod.benchmark import report
    from megatron_xmod.benchmark.measure import measure, write_trace
    from megatron_xmod.benchmark.subjects import hf_subject, make_tokens, variant_config, xmod_subject
    from megatron_xmod.config.schema import TrainConfig
    from megatron_xmod.kernels.registry import choose_names, describe
    from megatron_xmod.runtime.distributed import pick_device
    from megatron_xmod.runtime.memory import keep_freed_memory

    device = torch.device(pick_device(TrainConfig(device=options.device)))
    if device.type == "cpu":
        keep_freed_memory()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[
        options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    overrides += ["--data.seq_length", str(options.seq_length)]
    configs = {name: variant_config(options.config, name, overrides) for name in options.variants}
    if dtype == torch.bfloat16 and any(c.optimizer.name == "muon" for c in configs.values()):
        raise UserError("optimizer.name muon works on fp32 weights. Add --dtype fp32, or take adamw.")
    subjects = [xmod_subject(name, config, device, dtype) for name, config in configs.items()]
    first = next(iter(configs.values()))
    subjects += [hf_subject(peer, first, device, dtype) for peer in options.peer]
    print(describe(choose_names(first, device, dtype), first.kernels.compile))
    tokens = make_tokens(first, options.batch, device)
    found = measure(subjects, tokens, options.steps, options.accumulation, options.warm_up, device)
    tokens_per_step = options.batch * options.accumulation * options.seq_length
    made = report.rows(subjects, found, tokens_per_step, device)
    print(f"\n{report.table(made)}\n\n{report.machine(device)}")
    if options.json:
        report.save(made, options.json, shlex.join(["python", "tools/benchmark.py", *sys.argv[1:]]), device)
    if options.trace:
        options.trace.mkdir(parents=True, exist_ok=True)
        for subject in subjects:
            file = options.trace / f"{subject.name.replace(':', '_').replace('/', '_')}.json.gz"
            write_trace(subject, next(tokens), device, file)
            print(f"trace: {file}")


if __name__ == "__main__":
    run(main)
