"""The frame around a program: what a user can mend is one message, never a traceback; a failing rank ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from megatron_xmod.errors import UserError
from megatron_xmod.runtime.peers import is_peer_lost

# All ranks usually meet the same error. Rank 0 says it, and its end makes the launcher end the others before they
# repeat it; a rank that fails alone speaks after this time.
_SECONDS_BEFORE_OTHERS_SPEAK = 3.0


def run(main: Callable[[list[str]], None]) -> None:
    """Runs `main` on the command line and ends the process: 0, or 1 with a message."""
    try:
        main(sys.argv[1:])
        status = 0
    except UserError as error:
        status = _fail(f"error: {error}")
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader of our output has seen enough: `tool | head`
        os._exit(141)
    except Exception as error:  # noqa: BLE001 - the process ends here
        status = _fail("lost contact with another process; its own message says why." if is_peer_lost(error)
                       else traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
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
