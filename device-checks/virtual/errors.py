"""What can be wrong with a virtual device, said in one line."""


class DeviceError(Exception):
    """A fact for a person: what is missing or failed, and what to type next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
