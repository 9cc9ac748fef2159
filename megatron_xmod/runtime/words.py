"""Quantities as people write them."""


def duration(seconds: float) -> str:
    """1h05m, 3m20s."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
