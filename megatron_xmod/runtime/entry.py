"""The frame around a program: what a user can mend is one message, never a traceback; a failing rank ends at once."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from megatron_xmod.errors import UserError

# All ranks usually meet the same error. Rank 0 says it, and its end makes the launcher end the others before they
# repeat it; a rank that fails alone speaks after this time.
_SECONDS_BEFORE_OTHERS_SPEAK = 3.0
# What torch says when a peer has gone.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvValue failed",
              "Timed out waiting", "remote process has terminated", "NCCL communicator was aborted")


def run(main: Callable[[list[str]], None]) -> None:
    """Runs `main` on the command line and ends the process: 0, or 1 with a message."""
    try:
        main(sys.argv[1:])
        status = 0
    except UserError as error:
        status = _fail(f"error: {error}")
    except KeyboardInterrupt:
        status = 130
    except Exception as error:  # noqa: BLE001 - the process ends here
        lost = any(text in str(error) for text in _PEER_LOST)
        status = _fail("lost contact with another process; its own message says why." if lost
                       else traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: its clean-up may wait for peers that are gone.
    os._exit(status)


def _fail(message: str) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may end this process while it waits
        time.sleep(_SECONDS_BEFORE_OTHERS_SPEAK)
        message = f"[rank {rank}] {message}"
    print(message, file=sys.stderr, flush=True)
    return 1
