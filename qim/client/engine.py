"""The life of a connection: connect, log in, serve passes, reconnect; until closed or refused for good.

What a pass does stands in `work.py`. This module owns the one task of the client, the wake-up that its passes
wait for, and the decision whether and when there is another attempt: a final code ends the client and is
raised to everybody who waits; anything else is followed by the next attempt, at once, then exponentially with
full jitter, with the server's hint first.

When the other side dies without a word, the silence deadline ends the connection after 33 s. When the store
cannot commit, the connection ends too, because what could not be stored must come again. A damaged store ends
the client: the next opening mends it.
"""

import asyncio
import random
import ssl
from contextlib import suppress
from typing import NamedTuple, NoReturn

from qim.client.account import Account, Endpoint, Secret
from qim.client.errors import (
    AuthError,
    Disconnected,
    SdkError,
    StoreDamaged,
    StoreUnavailable,
    error_name,
    is_final,
)
from qim.client.events import EventHub
from qim.client.model import Connected, ConnectionLost, Reconnected, StoreTrouble
from qim.client.store import Store
from qim.client.sync import Reconnect
from qim.client.transport import ConnectionEnded, Transport
from qim.client.work import Work
from qim.clock import Clock
from qim.errors import Unauthenticated
from qim.ids import Millis
from qim.limits import AUTH_TIMEOUT_MS
from qim.wire.bodies import Auth, AuthAck, decode_body
from qim.wire.frames import Frame
from qim.wire.layout import Op


class Identity(NamedTuple):
    """What a login says."""

    endpoint: Endpoint
    server_name: str | None
    """The name the certificate must carry, where it is not the host of the endpoint."""
    account: Account
    client_name: str
    client_version: str


class Engine:
    """See the module docstring. Made, then `start`ed once, then `close`d once."""

    def __init__(
        self,
        identity: Identity,
        token: Secret,
        *,
        store: Store,
        tls: ssl.SSLContext,
        clock: Clock,
        jitter: random.Random,
    ) -> None:
        self.events = EventHub()
        self.fatal: SdkError | None = None
        self.store = store
        self._wake = asyncio.Event()
        self.work = Work(
            identity.account, store=store, events=self.events, clock=clock, jitter=jitter, wake=self._wake
        )
        self._identity = identity
        self._token = token
        self._tls = tls
        self._clock = clock
        self._jitter = jitter
        self._first_attempt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reconnect = Reconnect()
        self._login_count = 0
        self._login_time = Millis(0)

    # --- life

    async def start(self) -> None:
        """Loads the store and begins to connect; returns after the first attempt, whatever it gave."""
        await self.work.load()
        self._task = asyncio.create_task(self._run(), name="qim-client")
        await self._first_attempt

    async def close(self) -> None:
        """Ends the connection and the tasks; queued messages stay in the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.work.end_waiters(Disconnected("the client was closed; the message stays queued"))
        self.events.close(self.fatal)
        await self.store.close()

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Until logged in. Raises Disconnected with the last reason, or what ended the client."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._ready.wait()
        self.check_alive()
        if self.work.transport is None:
            raise Disconnected(self.work.last_end)

    def check_alive(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def replace_token(self, token: Secret) -> None:
        """Used from the next frame on; a living connection is renewed with it at once."""
        self._token = token
        if self.work.transport is not None and self.work.transport.is_ready:
            self.work.transport.request(Op.AUTH, self._auth_body())

    def _auth_body(self) -> Auth:
        who = self._identity
        return Auth(
            self._token.reveal(), self.work.device_id, who.client_name, who.client_version, self._login_time
        )

    # --- connect, serve, reconnect

    async def _run(self) -> None:
        while True:
            login_at: float | None = None
            try:
                frames = await self._connect()
                login_at = self._clock.monotonic()
                self._mark_first_attempt()
                await self._serve(frames)
            except ConnectionEnded as end:
                self.work.last_end = str(end)
                if is_final(end.code):
                    self._on_fatal(AuthError(str(end), code=end.code))
                    return
                lived = 0.0 if login_at is None else self._clock.monotonic() - login_at
                delay = self._on_end(end, lived_seconds=lived)
            except (AuthError, StoreDamaged) as error:
                self._on_fatal(error)
                return
            except Exception as error:
                # A mistake of ours must not look like a quiet client: everybody who waits hears of it.
                self._on_fatal(SdkError(f"the client stopped: {error!r}"))
                raise
            finally:
                self._mark_first_attempt()
            await asyncio.sleep(delay)

    async def _connect(self) -> list[Frame]:
        """A logged-in transport; returns the frames that came with AUTH_ACK."""
        transport = await Transport.connect(
            self._identity.endpoint,
            server_name=self._identity.server_name,
            tls=self._tls,
            clock=self._clock,
            wake=self._wake,
        )
        try:
            self._login_time = await self._next_login()
            # While the disk was busy the line may have gone, or the server may have said that it has no room.
            if end := transport.failure or transport.goodbye:
                raise end
            transport.request(Op.AUTH, self._auth_body())
            frames = await self._first_frames(transport)
            ack = self._read_login(frames[0])
        except BaseException:
            await transport.close()
            raise
        self._on_login(transport, ack)
        return frames[1:]

    async def _next_login(self) -> Millis:
        try:
            return await self.store.next_login()
        except StoreUnavailable as error:
            raise self._store_trouble(error) from error

    async def _first_frames(self, transport: Transport) -> list[Frame]:
        try:
            async with asyncio.timeout(AUTH_TIMEOUT_MS / 1000):
                while not transport.arrived and transport.failure is None:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError as error:
            raise ConnectionEnded("the server did not answer the login in time") from error
        frames = transport.take()
        if not frames:
            assert transport.failure is not None
            raise transport.failure
        return frames

    def _read_login(self, frame: Frame) -> AuthAck:
        if frame.opcode == Op.AUTH_ACK:
            ack: AuthAck = decode_body(Op.AUTH_ACK, frame.body)
            if ack.user_id != self._identity.account.user:
                raise AuthError("the server knows this token as another user", code=Unauthenticated.code)
            return ack
        if frame.opcode not in {Op.ERROR, Op.GOAWAY}:
            raise ConnectionEnded("the server answered the login with something else")
        body = decode_body(frame.opcode, frame.body)
        wait_ms = body.retry_after_ms if frame.opcode == Op.ERROR else body.reconnect_after_ms
        raise ConnectionEnded(
            f"{error_name(body.code)}: {body.text}", code=body.code, reconnect_after_ms=wait_ms
        )

    def _on_login(self, transport: Transport, ack: AuthAck) -> None:
        self.work.on_login(transport, ack)
        self._login_count += 1
        self._ready.set()
        self.events.emit(Connected() if self._login_count == 1 else Reconnected())

    async def _serve(self, frames: list[Frame]) -> NoReturn:
        transport = self.work.transport
        assert transport is not None
        reason = "the client was closed"
        try:
            while True:
                if frames:
                    await self.work.receive(frames)
                if transport.failure is not None:
                    raise transport.failure
                await self.work.pump()
                await self._wait(transport)
                frames = transport.take()
        except ConnectionEnded as end:
            reason = str(end)
            raise
        except StoreUnavailable as error:
            # What could not be stored must come again: the next login reads from the stored cursor.
            reason = str(error)
            trouble = self._store_trouble(error)
            raise transport.goodbye or trouble from error
        finally:
            self._ready.clear()
            self.work.on_disconnected(reason)
            await transport.close()

    def _store_trouble(self, error: StoreUnavailable) -> ConnectionEnded:
        self.events.emit(StoreTrouble(str(error)))
        return ConnectionEnded(str(error))

    async def _wait(self, transport: Transport) -> None:
        """Until something arrived, the application asked for something, or a deadline passed."""
        deadline = min(self.work.next_deadline(), transport.silence_deadline())
        if not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    await self._wake.wait()
        self._wake.clear()
        if transport.is_silent(self._clock.monotonic()) and not transport.arrived:
            transport.abort("the server has been silent for too long")

    def _on_end(self, end: ConnectionEnded, *, lived_seconds: float) -> float:
        """What to wait before the next attempt."""
        self._reconnect.on_end(lived_seconds=lived_seconds)
        delay = self._reconnect.delay_seconds(hint_ms=end.reconnect_after_ms, jitter=self._jitter.random())
        self.events.emit(ConnectionLost(str(end), end.code, delay))
        return delay

    def _on_fatal(self, error: SdkError) -> None:
        self.fatal = error
        self.work.end_waiters(error)
        self._ready.set()
        self.events.close(error)

    def _mark_first_attempt(self) -> None:
        if not self._first_attempt.done():
            self._first_attempt.set_result(None)
