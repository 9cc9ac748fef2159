import os
import resource

import pytest

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.files import PendingFile, sync_folder, write_atomically


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "summary.json"
    for text in ("old", "a longer new text\n", ""):
        write_atomically(path, text)
        assert path.read_text() == text
    assert os.listdir(tmp_path) == ["summary.json"]


def test_reader_sees_the_old_file_until_the_new_one_is_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    path.write_text("old")
    events = []
    flush, rename = os.fsync, os.replace

    def watched_flush(descriptor):
        events.append("flush")
        flush(descriptor)

    def watched_rename(source, target):
        events.append("rename")
        assert path.read_text() == "old"
        assert source.read_text() == "new"
        assert source.parent == path.parent  # a rename to another file system would be a copy
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_flush)
    monkeypatch.setattr(os, "replace", watched_rename)
    write_atomically(path, "new")
    assert events == ["flush", "rename", "flush"]  # the file, its name, the folder
    assert path.read_text() == "new"


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # the disk is full after 100 bytes
    try:
        with pytest.raises(UserError, match="cannot write .*config.yaml: File too large"):
            write_atomically(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_missing_folders_are_made(tmp_path):
    write_atomically(tmp_path / "new" / "folder" / "file", "text")
    assert (tmp_path / "new" / "folder" / "file").read_text() == "text"
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")


def test_pending_file_appears_when_published(tmp_path):
    path = tmp_path / "text.bin"
    file = PendingFile(path)
    file.write(b"first ")
    file.write(memoryview(b"second"))
    file.seal()
    assert not path.exists()
    file.publish()
    file.discard()
    assert path.read_bytes() == b"first second"
    assert os.listdir(tmp_path) == ["text.bin"]


@pytest.mark.parametrize("sealed", [False, True])
def test_discarded_file_leaves_nothing(tmp_path, sealed):
    path = tmp_path / "text.bin"
    path.write_bytes(b"old")
    file = PendingFile(path)
    file.write(b"new")
    if sealed:
        file.seal()
    file.discard()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["text.bin"]


def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        PendingFile(tmp_path / "file" / "text.bin")
