"""The exceptions that end a command with one sentence instead of a traceback."""


class UserError(ValueError):
    """Something the user can mend. The message is one sentence: what, where and how; the command exits with 2."""


class RunError(RuntimeError):
    """A run that failed through no mistake in its settings; one sentence too, and the command exits with 1."""
