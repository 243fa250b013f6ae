"""The one error that metadist raises for what a user did."""


class UserError(ValueError):
    """Something that the user can mend: a wrong option, a missing file, a full disk.

    The message is one sentence that says what was wrong, what was expected and what to do.
    The experiments print it on rank zero, without a traceback, and exit with status 2;
    every other exception is a fault of the program and keeps its traceback.
    """
