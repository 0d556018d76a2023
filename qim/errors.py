"""The whole error tree, the codes of the protocol and the exit codes of the programs.

    QimError
    ├── ClientError                      what a client is told (`code`, `retryable`, `reconnect`)
    │   ├── 1000–1999  final             Unauthenticated, PermissionDenied, InvalidArgument, Conflict,
    │   │                                FailedPrecondition, Unsupported, TooLarge
    │   ├── 2000–2999  repeat            Unavailable, ResourceExhausted, DeadlineExceeded,
    │   │                                MembershipChanged
    │   ├── 3000–3999  reconnect         GoingAway, SlowConsumer, HeartbeatLost
    │   └── 4000–4999  give up           RemoteProtocolError, AuthRequired, Replaced, VersionUnsupported
    ├── StoreError                       what a store answered
    │   ├── StoreUnknown                 the outcome is unknown: repeat with the same identity
    │   ├── StoreRefused                 a definite no: nothing was written
    │   │   ├── StaleOwner               a newer owner took the slot
    │   │   └── StoreUnfit               wrong settings or wrong instance; the slot stops
    │   └── StoreBroken                  the store answered what it must never answer; the slot stops
    ├── LogError                         LogIdentityChanged
    │   └── PartitionStopped             OffsetOutOfRange, EntryUnreadable: one partition, alone
    ├── ControlError                     what a tool was told over a control socket
    │   ├── ControlUnreachable           nobody answered; whether it was done is unknown (exit 69)
    │   └── ControlRefused               the process answered no, with its reason and exit code
    ├── GuardRefused                     a start-up guard said no (exit 78), or 65 for a foreign store
    └── ConfigError                      unreadable or contradicting configuration (exit 78)

An error from a store is *unknown* unless it is proved to be a *no* (reliability contract, section 4).
The range of a code tells an old client what to do with a code that it does not know.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar, Final


class QimError(Exception):
    """Root of everything this project raises on purpose."""


# --- what a client is told -------------------------------------------------------------------------


class ClientError(QimError):
    """An answer to a client: a code of the protocol, never a text of another user."""

    code: ClassVar[int] = 0
    retryable: ClassVar[bool] = False
    reconnect: ClassVar[bool] = False

    def __init__(self, text: str = "", *, retry_after_ms: int = 0) -> None:
        super().__init__(text)
        self.text = text
        self.retry_after_ms = retry_after_ms


class Unauthenticated(ClientError):
    code = 1001


class PermissionDenied(ClientError):
    """Not allowed, or does not exist: the same bytes for both."""

    code = 1002


class InvalidArgument(ClientError):
    code = 1003


class Conflict(ClientError):
    """The same client_message_id was used with other content."""

    code = 1004


class FailedPrecondition(ClientError):
    code = 1005


class Unsupported(ClientError):
    code = 1006


class TooLarge(ClientError):
    code = 1007


class Unavailable(ClientError):
    """Nothing reached a store."""

    code = 2001
    retryable = True


class ResourceExhausted(ClientError):
    code = 2002
    retryable = True


class DeadlineExceeded(ClientError):
    """The outcome is unknown; the same client_message_id settles it."""

    code = 2003
    retryable = True


class MembershipChanged(ClientError):
    code = 2004
    retryable = True


class GoingAway(ClientError):
    code = 3001
    reconnect = True


class SlowConsumer(ClientError):
    code = 3002
    reconnect = True


class HeartbeatLost(ClientError):
    code = 3003
    reconnect = True


class RemoteProtocolError(ClientError):
    """The peer broke the protocol; the connection ends."""

    code = 4001


class AuthRequired(ClientError):
    code = 4002


class Replaced(ClientError):
    """A newer login of the same device took over."""

    code = 4003


class VersionUnsupported(ClientError):
    code = 4004


CLIENT_ERRORS: Final[dict[int, type[ClientError]]] = {
    cls.code: cls
    for cls in (
        Unauthenticated, PermissionDenied, InvalidArgument, Conflict, FailedPrecondition, Unsupported,
        TooLarge,
        Unavailable, ResourceExhausted, DeadlineExceeded, MembershipChanged,
        GoingAway, SlowConsumer, HeartbeatLost,
        RemoteProtocolError, AuthRequired, Replaced, VersionUnsupported,
    )
}  # fmt: skip


# --- what a store or a log answered ----------------------------------------------------------------


class StoreError(QimError):
    """A store did not do what it was asked."""


class StoreUnknown(StoreError):
    """Time-out, reset or end of stream after bytes were sent: repeat with the same identity."""


class StoreRefused(StoreError):
    """Proved: nothing was written (out of memory, loading, not connected)."""


class StaleOwner(StoreRefused):
    """A newer owner took the slot; this process must stop serving it."""


class StoreUnfit(StoreRefused):
    """The instance cannot serve us as it is set up (MISCONF, READONLY, wrong login): the slot stops."""


class StoreBroken(StoreError):
    """Wrong type under a key, a reply of the wrong shape: the slot stops, an operator looks."""


class LogError(QimError):
    """A log cannot serve what was asked."""


class PartitionStopped(LogError):
    """A reader cannot go on in one partition; the others are not affected. Nothing is skipped."""

    def __init__(self, text: str = "", *, partition: int | None = None) -> None:
        super().__init__(text)
        self.partition = partition
        """Where it happened; None: not known, then every partition of the reader stops."""


class OffsetOutOfRange(PartitionStopped):
    """The position lies outside the log, or the log jumped."""


class EntryUnreadable(PartitionStopped):
    """What stands at the position is none of our entries, or the partition is no log at all."""


class LogIdentityChanged(LogError):
    """The log is not the one whose positions are stored."""


class RecordCorrupt(QimError):
    """Bytes in a log or store do not decode, or contradict their header."""


# --- what ends a process ---------------------------------------------------------------------------


class ExitCode(IntEnum):
    """Exit codes of servers and tools alike."""

    OK = 0
    NO = 1
    USAGE = 2
    FOREIGN_STORE = 65
    UNREACHABLE = 69
    BUG = 70
    FENCED = 75
    CONFIG = 78


class ControlError(QimError):
    """A command over a control socket was not carried out, or nobody knows."""

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class ControlUnreachable(ControlError):
    """No process, no answer, or half an answer. Every command may be repeated."""

    def __init__(self, text: str) -> None:
        super().__init__(text, exit_code=ExitCode.UNREACHABLE)


class ControlRefused(ControlError):
    """A definite no of the process that was asked."""

    def __init__(self, text: str, *, exit_code: int = ExitCode.NO) -> None:
        super().__init__(text, exit_code=exit_code)


class GuardRefused(QimError):
    """A start-up guard refused. Names the setting, the value found, the value wanted and what mends it."""

    def __init__(self, text: str, *, exit_code: ExitCode = ExitCode.CONFIG) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class ConfigError(QimError):
    """All problems of a configuration at once, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
