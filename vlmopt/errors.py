"""The one error type that a user can cause: its message is a sentence that says what to do."""


class VlmoptError(RuntimeError):
    """Raised for anything that a user can put right; command-line doors print it without a traceback."""


class PartFailed(VlmoptError):
    """A part of a config, named by `part`, does not work here; without `strict` it is left out."""

    def __init__(self, part: str, reason: str):
        super().__init__(reason)
        self.part = part
