"""Command-line options that the data tools share."""

import argparse


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Which text to read; see `corpus.find_files`."""
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH",
                        help="files, folders or globs: JSON Lines, or plain text (one document a file), also .gz, .zst")
    parser.add_argument("--format", choices=("auto", "jsonl", "text"), default="auto",
                        help="auto: .jsonl, .ndjson and .json hold one JSON object a line, other files are plain text")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of the text in JSON Lines "
                        "(default %(default)s)")
    parser.add_argument("--extensions", nargs="+", metavar=".EXT",
                        help="endings taken inside folders (default: usual text and source files)")
    parser.add_argument("--exclude", nargs="+", metavar="GLOB",
                        help="names of files or folders to leave out inside folders")
