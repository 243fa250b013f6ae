"""The error that metadist raises for mistakes of the user."""


class UserError(ValueError):
    """A user-fixable error: a wrong option, a missing file, a full disk.

    The message is one sentence that says what was wrong, what was expected and what to do. Entry
    points print it on rank zero, without a traceback, and exit with status 2; any other exception
    is printed with its traceback.
    """
