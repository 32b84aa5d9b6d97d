"""The errors a user can cause, each with a remedy, in the lowest layer: every layer may raise them."""

from __future__ import annotations


class AuditError(Exception):
    """Base of all errors that are the input's fault; the command line prints it in one line.

    Args:
        message: What is wrong, naming the thing and the value.
        remedy: What the user can do about it.
    """

    exit_code = 2

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UsageError(AuditError):
    """A wrong option, policy, configuration or path: exit code 2."""


class NoDataError(AuditError):
    """Nothing to judge: exit code 3. No data is never a pass."""

    exit_code = 3


class StoreError(AuditError):
    """The store cannot be read, or is not a routing store: exit code 4."""

    exit_code = 4
