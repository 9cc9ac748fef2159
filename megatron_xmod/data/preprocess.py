"""Text files to a Megatron shard, with several worker processes and bounded memory.

The parent cuts the input into tasks of about a megabyte, in a fixed order; workers tokenize them; the parent writes
the results in that order, so the shard does not depend on the number of workers.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron_xmod.data.corpus import (
    BLOCK_BYTES,
    BadDocument,
    Block,
    find_files,
    has_json_lines,
    parse_json_line,
    read_blocks,
    read_text,
)
from megatron_xmod.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_xmod.data.tokenizer import Tokenizer, load_tokenizer
from megatron_xmod.errors import UserError

TASKS_PER_WORKER = 3  # handed out ahead of the writer; bounds memory
_SECONDS_TO_CLEAN_UP = 5.0
REPORTED = 20  # skipped documents shown one by one; the rest is only counted


@dataclass(frozen=True)
class TokenizerSpec:
    """How a worker opens the tokenizer; see `load_tokenizer`."""

    kind: str
    path: str | None = None
    eod_token: str | None = None

    def load(self) -> Tokenizer:
        return load_tokenizer(self.kind, self.path, self.eod_token)


@dataclass(frozen=True)
class Task:
    """Work for one worker: a block of JSON Lines of one file, or whole plain-text files; with the bytes of disk."""

    paths: list[Path]
    block: Block | None
    disk_bytes: int


@dataclass
class Result:
    """What a task gave: tokens [T] end to end, tokens per document, documents left out, bytes of the text kept."""

    tokens: np.ndarray
    lengths: list[int] = field(default_factory=list)
    skipped: list[BadDocument] = field(default_factory=list)
    text_bytes: int = 0


@dataclass
class Summary:
    """Totals of a job."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    seconds: float = 0.0
    skipped: Counter = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.documents += len(result.lengths)
        self.tokens += len(result.tokens)
        self.text_bytes += result.text_bytes
        self.skipped.update(bad.reason for bad in result.skipped)

    def __str__(self) -> str:
        lines = [
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.text_bytes:,} bytes "
            f"({self.text_bytes / max(self.tokens, 1):.2f} bytes per token) in {self.seconds:.1f} s: "
            f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
        ]
        lines += [f"skipped {count:,}: {reason}" for reason, count in self.skipped.most_common()]
        return "\n".join(lines)


class DocumentEncoder:
    """Tokenizes tasks; one lives in every worker.

    Args:
        tokenizer: opened once.
        text_key: key of the text in JSON Lines.
        append_eod: end each document with the tokenizer's `eod`.
    """

    def __init__(self, tokenizer: Tokenizer, text_key: str, append_eod: bool):
        self.tokenizer, self.text_key, self.append_eod = tokenizer, text_key, append_eod
        self.dtype = token_dtype(tokenizer.vocab_size)

    def run(self, task: Task) -> Result:
        """Tokenize one task; bad documents are listed, not raised."""
        result = Result(np.empty(0, self.dtype))
        parts: list[np.ndarray] = []
        for texts in self._documents(task):
            try:
                document, text_bytes = self._encode(texts)
            except BadDocument as bad:
                result.skipped.append(bad)
                continue
            parts += document
            result.lengths.append(sum(map(len, document)))
            result.text_bytes += text_bytes
        if parts:
            result.tokens = np.concatenate(parts)
        return result

    def _documents(self, task: Task) -> Iterator[Iterable[str]]:
        """The documents of a task, each as consecutive pieces of text; taking a piece may raise BadDocument."""
        if task.block is None:
            yield from map(read_text, task.paths)
        else:
            yield from (
                self._text_of_line(line, task.paths[0], number) for number, line in task.block.numbered_lines()
            )

    def _text_of_line(self, line: bytes, path: Path, number: int) -> Iterator[str]:
        yield parse_json_line(line, self.text_key, path, number)

    def _encode(self, texts: Iterable[str]) -> tuple[list[np.ndarray], int]:
        """Tokens of one document in pieces, and its bytes of text."""
        document, text_bytes = [], 0
        for text in texts:
            text_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
            document.append(np.array(self.tokenizer.encode(text), dtype=self.dtype))
        if self.append_eod:
            document.append(np.array([self.tokenizer.eod], dtype=self.dtype))
        return document, text_bytes


def make_tasks(files: list[Path], format: str) -> Iterator[Task]:
    """Cut the input into tasks, in the order of the documents; small plain files share one."""
    group: list[Path] = []
    size = 0
    for path in files:
        json_lines = has_json_lines(path, format)
        if group and (json_lines or size >= BLOCK_BYTES):
            yield Task(group, None, size)
            group, size = [], 0
        if json_lines:
            yield from (Task([path], block, block.disk_bytes) for block in read_blocks(path))
        else:
            group.append(path)
            size += path.stat().st_size
    if group:
        yield Task(group, None, size)


def preprocess(
    inputs: list[str],
    output: str,
    spec: TokenizerSpec,
    *,
    workers: int = 1,
    format: str = "auto",
    text_key: str = "text",
    append_eod: bool = True,
    strict: bool = False,
    extensions: list[str] | None = None,
    exclude: list[str] | None = None,
) -> Summary:
    """Tokenize text files into the shard `output`.bin / .idx, showing progress on standard error.

    Args:
        inputs, extensions, exclude: see `find_files`.
        format: "auto", "jsonl" or "text"; see `has_json_lines`.
        strict: stop at the first bad document instead of leaving it out.

    Raises:
        UserError: bad input or options, a worker that failed, or no space; an older shard of that name stays as it was.
    """
    if workers < 1:
        raise UserError(f"--workers is {workers}; it must be at least 1")
    started = time.perf_counter()
    files = find_files(inputs, extensions, exclude)
    encoder = DocumentEncoder(spec.load(), text_key, append_eod)
    summary = Summary()
    disk_bytes = sum(path.stat().st_size for path in files)
    with (
        IndexedDatasetWriter(output, encoder.dtype) as writer,
        closing(_run_tasks(make_tasks(files, format), encoder, (spec, text_key, append_eod), workers)) as results,
        progress_bar(disk_bytes, f"{len(files):,} files") as bar,
    ):
        for task, result in results:
            _report(result.skipped, summary, strict)
            summary.add(result)
            writer.add_documents(result.tokens, result.lengths)
            bar.update(task.disk_bytes)
            bar.set_postfix_str(f"{summary.documents:,} documents, {summary.tokens:,} tokens", refresh=False)
        if summary.documents == 0:
            raise UserError(f"no document could be used, so nothing was written ({dict(summary.skipped) or 'no text'})")
    summary.seconds = time.perf_counter() - started
    return summary


def progress_bar(total: int, label: str) -> tqdm:
    """A bar over bytes; in a log file it prints a line's worth only every few seconds."""
    interval = 0.2 if sys.stderr.isatty() else 5.0
    return tqdm(total=total, desc=label, unit="B", unit_scale=True, mininterval=interval, dynamic_ncols=True)


def _report(skipped: list[BadDocument], summary: Summary, strict: bool) -> None:
    """Say which documents are left out; with `strict` the first one is an error."""
    shown = summary.skipped.total()
    for number, bad in enumerate(skipped, shown):
        if strict:
            raise UserError(f"{bad} (refused because of --strict; nothing was written)")
        if number < REPORTED:
            tqdm.write(f"skipped {bad}", file=sys.stderr)
        elif number == REPORTED:
            tqdm.write("further skipped documents are counted, not shown", file=sys.stderr)


def _run_tasks(tasks, encoder, options, workers) -> Iterator[tuple[Task, Result]]:
    """Results of all tasks in their order."""
    if workers == 1:
        for task in tasks:
            yield task, _guarded(encoder.run, task)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks held by threads of the tokenizer library
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _start_worker, options)
    try:
        waiting: deque = deque()
        for task in tasks:
            waiting.append((task, pool.submit(_work, task)))
            if len(waiting) > TASKS_PER_WORKER * workers:
                yield waiting[0][0], waiting.popleft()[1].result()
        while waiting:
            yield waiting[0][0], waiting.popleft()[1].result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, most likely killed for lack of memory; use fewer --workers. Nothing was written"
        ) from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()  # don't wait for the tasks under way
        # Waiting for its end without limit can last forever where much is queued for the workers that are gone.
        manager = pool._executor_manager_thread
        pool.shutdown(wait=False, cancel_futures=True)
        if manager is not None:
            manager.join(_SECONDS_TO_CLEAN_UP)
        raise
    else:
        pool.shutdown()


def _guarded(run: Callable[[Task], Result], task: Task) -> Result:
    try:
        return run(task)
    except UserError:
        raise
    except Exception as error:
        where = f"{task.paths[0]}" + (f" from line {task.block.first_line}" if task.block else "")
        raise UserError(f"tokenizing {where} failed: {type(error).__name__}: {error}") from error


_encoder: DocumentEncoder | None = None  # the one thing a worker process keeps between tasks


def _start_worker(spec: TokenizerSpec, text_key: str, append_eod: bool) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_follow_parent, daemon=True).start()
    _encoder = DocumentEncoder(spec.load(), text_key, append_eod)


def _follow_parent() -> None:
    """End this worker when the parent is gone, however it went."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(task: Task) -> Result:
    return _guarded(_encoder.run, task)
