"""The one error type that a user can cause: its message is a sentence that says what to do."""


class VlmoptError(RuntimeError):
    """Raised for anything that a user can put right; command-line doors print it without a traceback."""
