"""Continues a prompt with a trained model: `python tools/generate.py --checkpoint runs/quickstart --prompt "def "`."""

import argparse
import sys
import time

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.entry import run


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a run's folder (its newest checkpoint) or one checkpoint")
    parser.add_argument("--prompt", default="", help="text to continue; empty starts a new document")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to write at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--top-k", type=int, default=0, help="sample among this many likeliest tokens; 0: among all")
    parser.add_argument("--top-p", type=float, default=0.95, help="sample among the likeliest with this probability")
    parser.add_argument("--seed", type=int, default=None, help="of the sampling; default: another one each time")
    parser.add_argument("--tokenizer-path", default=None, help="where the tokenizer is now, if it was moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run")
    options = parser.parse_args(arguments)
    for name, good in (("max_new_tokens", options.max_new_tokens >= 1), ("temperature", options.temperature >= 0),
                       ("top_k", options.top_k >= 0), ("top_p", 0 < options.top_p <= 1)):
        if not good:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}, which is out of range.")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)

    from megatron_xmod.checkpoint.weights import load_transformer
    from megatron_xmod.config.schema import TrainConfig
    from megatron_xmod.data.tokenizer import load_tokenizer
    from megatron_xmod.inference.cache import KVCache
    from megatron_xmod.inference.generate import generate, heal
    from megatron_xmod.runtime.distributed import pick_device

    model, config = load_transformer(options.checkpoint)
    if config.data.tokenizer is None:
        raise UserError("this model was trained without a tokenizer (data.tokenizer is null), so text means nothing to "
                        "it.")
    tokenizer = load_tokenizer(config.data.tokenizer, options.tokenizer_path or config.data.tokenizer_path)
    model.to(pick_device(TrainConfig(device=options.device)))
    prompt, first = heal(tokenizer, tokenizer.encode(options.prompt) or [tokenizer.eod])
    if len(prompt) + options.max_new_tokens > config.data.seq_length:
        print(f"note: beyond {config.data.seq_length} tokens the model sees positions that it was not trained on",
              file=sys.stderr)
    cache, written, shown = KVCache(), list(prompt), ""
    started = time.perf_counter()
    for token in generate(model, prompt, options.max_new_tokens, temperature=options.temperature, top_k=options.top_k,
                          top_p=options.top_p, seed=options.seed, stop=tokenizer.eod, first=first, cache=cache):
        written.append(token)
        shown = _show(tokenizer.decode(written), shown)
    _show(tokenizer.decode(written), shown, last=True)
    print()
    seconds = time.perf_counter() - started
    new, active = len(written) - len(prompt), cache.executed_tokens() / max(cache.length, 1)
    print(f"[{new} tokens, {new / seconds:.0f} per second; a token passed {active:.1f} of "
          f"{model.context.plan.layers} layers; cache {cache.bytes() / 2**20:.1f} MiB]", file=sys.stderr)


def _show(text: str, shown: str, last: bool = False) -> str:
    """Prints what is new. A character whose bytes have not all come yet waits."""
    if not last:
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    print(text[len(shown):], end="", flush=True)
    return text


if __name__ == "__main__":
    run(main)
