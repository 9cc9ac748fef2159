"""The one exception for what a user can cause and can mend."""


class UserError(ValueError):
    """Something outside the program is wrong: a setting, a file, a disk.

    The message says what was wrong, where, and what to do. Entry points print it without a traceback.
    """
