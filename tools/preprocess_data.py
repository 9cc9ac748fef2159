"""Tokenizes text files into a Megatron shard: OUTPUT.bin and OUTPUT.idx, in the order of the input."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from megatron_xmod.data.arguments import add_input_arguments
from megatron_xmod.data.preprocess import TokenizerSpec, preprocess
from megatron_xmod.data.tokenizer import KINDS
from megatron_xmod.runtime.entry import run


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the shard, without .bin and .idx")
    parser.add_argument("--tokenizer", required=True, choices=KINDS)
    parser.add_argument("--tokenizer-path", metavar="FILE", help="a SentencePiece .model or a tokenizer.json")
    parser.add_argument("--eod-token", metavar="NAME", help="token that ends a document, if the tokenizer's file "
                        "does not say it")
    parser.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True,
                        help="end every document with that token")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)),
                        help="processes that tokenize (default: all cores, %(default)s)")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad document, write nothing")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that unfinished files are removed
    spec = TokenizerSpec(options.tokenizer, options.tokenizer_path, options.eod_token)
    summary = preprocess(options.input, options.output, spec, workers=options.workers, format=options.format,
                         text_key=options.text_key, append_eod=options.append_eod, strict=options.strict,
                         extensions=options.extensions, exclude=options.exclude)
    print(f"{summary}\n{options.output}.bin and {options.output}.idx")


if __name__ == "__main__":
    run(main)
