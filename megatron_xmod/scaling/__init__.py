"""Scaling laws of sparse depth: the forms, fitting and judging them, choosing K and A. No torch here.

The laws themselves need only numpy; fitting and pictures need scipy and matplotlib.
"""

from importlib.util import find_spec

from megatron_xmod.errors import UserError


def require_extra() -> None:
    """Refuses to go on where the packages of the optional extra `scaling` are missing."""
    missing = [name for name in ("scipy", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UserError(f"this tool needs {' and '.join(missing)}: pip install 'megatron_xmod[scaling]', or in a "
                        "checkout pip install -c constraints.txt -e '.[scaling]'.")
