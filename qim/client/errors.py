"""The failures that an application meets, and which code of the server becomes which.

    SdkError
    ├── AuthError           the server refused the login: final, never retried by itself
    ├── MessageRejected     this message or request was refused, here or by the server: final
    ├── RateLimited         the server asks to wait `retry_after` seconds
    ├── Disconnected        no connection, and this request is not kept for later
    ├── Timeout             the outcome is unknown; a queued message is still sent
    └── StoreError          the local file: StoreUnavailable (cannot be opened or written),
                            StoreDamaged (it was damaged while open; reopening mends it)

The range of a code decides which of them a code of the server becomes, so a code that this version does not
know is still handled as its range demands.
"""

from typing import Final

from qim.errors import CLIENT_ERRORS, QimError, ResourceExhausted, Unauthenticated


class SdkError(QimError):
    """Root of everything the SDK raises on purpose."""


class AuthError(SdkError):
    """The login was refused, or ended for good. The application needs a new token or another decision."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class MessageRejected(SdkError):
    """A final no: nothing was written by the server, and repeating it would be refused again."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class RateLimited(SdkError):
    """Too many requests; nothing was written."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the server asks to wait {retry_after:.3f} s")
        self.retry_after = retry_after


class Disconnected(SdkError):
    """There is no connection for a request that is not kept for later."""


class Timeout(SdkError):  # the word a user of a messaging SDK looks for
    """No answer in time: the outcome is unknown. A queued message stays queued and keeps its identity."""


class StoreError(SdkError):
    """The local store did not do what it was asked; nothing of the failed step was written."""


class StoreUnavailable(StoreError):
    """The file cannot be opened or written: permissions, a full disk, another process that holds it."""


class StoreDamaged(StoreError):
    """The file was found damaged while it was open. The next opening sets it aside and rebuilds it."""


FINAL_RANGES: Final = ((1000, 2000), (4000, 5000))


def error_name(code: int) -> str:
    """The name of a code for people; a code of a newer server shows its number."""
    known = CLIENT_ERRORS.get(code)
    return known.__name__ if known else f"code {code}"


def is_final(code: int) -> bool:
    """Whether repeating, or connecting again, is pointless."""
    return any(low <= code < high for low, high in FINAL_RANGES)


def build_failure(code: int, text: str, retry_after_ms: int) -> SdkError:
    """The exception for a request that the server answered with a code."""
    shown = f"{error_name(code)}: {text}" if text else error_name(code)
    if code == Unauthenticated.code or 4000 <= code < 5000:
        return AuthError(shown, code=code)
    if code == ResourceExhausted.code:
        return RateLimited(retry_after_ms / 1000)
    if is_final(code):
        return MessageRejected(shown, code=code)
    if 3000 <= code < 4000:
        return Disconnected(shown)
    return Timeout(shown)
