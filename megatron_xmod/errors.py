"""The one exception for what a user can cause and can mend."""


class UserError(ValueError):
    """Something outside the program is wrong: a setting, a file, a disk.

    The message says what was wrong, where, and what to do. Entry points print it without a traceback.
    """


class CombinationError(UserError):
    """Settings that exist and have the right type, but whose values do not give a model or a run."""
