"""Telling the loss of another process from an error of one's own."""

from __future__ import annotations

# What gloo, NCCL and the store say when a peer has gone or does not answer.
_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvValue failed",
          "Timed out waiting", "timed out", "remote process has terminated", "NCCL communicator was aborted",
          "ncclRemoteError", "ncclSystemError", "NCCL operations have failed or timed out", "Socket Timeout")


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error of a collective means that another process failed; that one's message says why."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
