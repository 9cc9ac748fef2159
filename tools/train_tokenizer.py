"""Trains a SentencePiece tokenizer on text files. Every text comes back exactly from it, white space and all."""

from __future__ import annotations

import argparse
import time

from megatron_xmod.data.arguments import add_input_arguments
from megatron_xmod.data.tokenizer_training import train_tokenizer
from megatron_xmod.runtime.entry import run


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="the model to write, FILE.model")
    parser.add_argument("--vocab-size", type=int, default=32768, help="pieces to learn (default %(default)s)")
    parser.add_argument("--sample-mb", type=float, default=100, metavar="MB",
                        help="learn from at most this much text, an equal share of every file (default %(default)s)")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    size = train_tokenizer(options.input, options.output, options.vocab_size, format=options.format,
                           text_key=options.text_key, sample_bytes=int(options.sample_mb * 1e6),
                           extensions=options.extensions, exclude=options.exclude)
    print(f"learned {options.vocab_size:,} pieces from {size:,} bytes in {time.perf_counter() - started:.1f} s: "
          f"{options.output}")


if __name__ == "__main__":
    run(main)
