#!/usr/bin/env bash
# The main job on a small scale, in less than 10 minutes on 2 cores: text -> tokenizer -> shards -> a small X-MoD trained by
# 2 processes, stopped half-way and resumed -> text that it writes. The text is the source code of Python's own standard
# library; --input PATH takes yours (files, folders; .jsonl, .txt, .py, ...). All of it lands in runs/quickstart.
set -euo pipefail

input="" prompt="def " vocab_size=4096
while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
        --input\ ?*) input=$(realpath -- "$2"); shift 2 ;;
        --prompt\ ?*) prompt=$2; shift 2 ;;
        --vocab-size\ ?*) vocab_size=$2; shift 2 ;;  # less for a small text
        *) echo "usage: bash examples/quickstart.sh [--input PATH] [--prompt TEXT] [--vocab-size N]" >&2; exit 2 ;;
    esac
done
cd "$(dirname "$0")/.."

bash tools/setup_venv.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
run=runs/quickstart
python=(python -u)
exclude=()
if [ -z "$input" ]; then
    input=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
    exclude=(--extensions .py --exclude site-packages test tests idle_test lib2to3)
fi
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
processes=2
if [ "$gpus" = 0 ]; then
    export DS_ACCELERATOR=cpu
elif [ "$gpus" = 1 ]; then
    processes=1
fi
say() { printf '\n== %s\n' "$*"; }

if [ -e "$run" ]; then  # an earlier one is kept
    n=1
    while [ -e "$run.$n" ]; do n=$((n + 1)); done
    mv "$run" "$run.$n"
fi
mkdir -p "$run"
case "$input" in
    *.jsonl | *.ndjson | *.json | *.gz | *.zst) ;;
    *)  # One plain file would be one document; validation needs documents of its own.
        if [ -f "$input" ]; then
            mkdir "$run/parts"
            split --line-bytes 64K --additional-suffix .txt "$input" "$run/parts/"
            input=$run/parts
        fi ;;
esac

say "1/5 A tokenizer of $vocab_size pieces from $input"
"${python[@]}" tools/train_tokenizer.py --input "$input" "${exclude[@]}" --vocab-size "$vocab_size" --output "$run/tokenizer.model"

say "2/5 Tokenized shards, 2 workers"
"${python[@]}" tools/preprocess_data.py --input "$input" "${exclude[@]}" --tokenizer sentencepiece \
    --tokenizer-path "$run/tokenizer.model" --output "$run/text" --workers 2

train=(deepspeed --quiet --num_accelerators "$processes" --master_port "$(python -c 'import socket
s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')" pretrain_xmod.py --config examples/configs/quickstart.yaml
    --data.paths "$run/text" --data.tokenizer_path "$run/tokenizer.model" --train.output "$run"
    --parallel.pipeline_parallel_size "$processes")
say "3/5 Training on $processes processes, up to the middle"
"${train[@]}" --train.exit_after 250

say "4/5 The same command again: it resumes from the checkpoint"
"${train[@]}"

say "5/5 The model continues \"$prompt\""
python tools/generate.py --checkpoint "$run" --prompt "$prompt" --max-new-tokens 120 --temperature 0.7 --seed 1

say "Done"
python - "$run" <<'END'
import json
import sys

run = sys.argv[1]
summary = json.load(open(f"{run}/summary.json"))
first, last = summary["validation"][0], summary["validation"][-1]
print(f"""validation loss, causal routing: {first["loss_causal"]:.3f} -> {last["loss_causal"]:.3f} nats per token
gap to top-k routing at the end:  {last["loss_causal"] - last["loss_topk"]:+.4f}

{run}/tokenizer.model          the tokenizer
{run}/text.bin, text.idx       the tokenized text
{run}/checkpoints/             checkpoints; tools/generate.py --checkpoint {run} --prompt "..." writes more
{run}/config.yaml              every setting of the run
{run}/metrics.jsonl            a line per logged step
{run}/summary.json             validation losses and the end of the run

Curves: .venv/bin/tensorboard --logdir {run}/tensorboard""")
END
