"""The supervisor: forks the children, watches their heartbeats, brings them back, ends them in stages.

It knows nothing of chat: a child is a name and an entry point. It compares wanted with actual children and
acts on the difference, in one `selectors` loop that wakes for signals and at every tick. It holds no event
loop, no thread and no client for its whole life, and asserts that before every fork.

Signal handlers do nothing; the interpreter writes the signal's number to the wake-up pipe and the loop reads
it. The rules (when to restart, whom to kill, how a drain goes on) are in `qim/domain/supervisor.py`.

    child dies          re-forked after its back-off; 65 and 78 end the whole service with that code
    child falls silent  slow, SIGABRT, SIGKILL
    SIGTERM, SIGINT     staged drain; the second one jumps to the last stage
    SIGHUP              `on_reload` decides; a refused reload changes nothing
    supervisor dies     the kernel kills the children (parent-death signal)

The supervisor writes the stage it wants into the shared page and nudges with SIGTERM; the child writes the
stage it has done. Nothing else passes between them, so neither can block the other.
"""

import gc
import os
import selectors
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from structlog import get_logger

from qim.clock import Clock
from qim.domain.supervisor import (
    ChildState,
    Drain,
    Fate,
    RestartPolicy,
    Silence,
    Stage,
    WatchLimits,
    judge_exit,
    judge_silence,
    may_ping_watchdog,
)
from qim.errors import ConfigError, ExitCode
from workers.child import ChildContext, ChildEntry, run_child
from workers.forkable import assert_forkable
from workers.heartbeat import HeartbeatPage, HeartbeatRecord
from workers.listeners import Listeners
from workers.notify import Notifier

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
EXTEND_EVERY_MS: Final = 5_000
EXTEND_USEC: Final = 30_000_000
"""While a store is down at start the manager is asked for so much more time, six times as often as needed."""
MEASURES: Final = {Silence.ABORT: signal.SIGABRT, Silence.KILL: signal.SIGKILL}

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """A wanted child."""

    name: str
    entry: ChildEntry
    listens: bool = False
    """Whether it owns the listener of its number among the listening children, in plan order."""
    ends_last: bool = False
    """Ended only when all others have, so that health can be seen to the end."""


@dataclass(slots=True)
class Child:
    """A wanted child and what became of it."""

    plan: ChildPlan
    number: int
    listener_slot: int | None
    record: HeartbeatRecord
    policy: RestartPolicy
    pid: int = 0
    """0: not running."""
    generation: int = 0
    due_ms: int | None = 0
    """When to fork it next; None: never again, or it runs."""
    measure: Silence = Silence.FINE
    """Strongest measure taken against the present process."""


class Supervisor:
    """One service: its children, from the first fork to the last reap."""

    def __init__(
        self,
        plans: Sequence[ChildPlan],
        *,
        page: HeartbeatPage,
        listeners: Listeners,
        notifier: Notifier,
        clock: Clock,
        jitter: Callable[[], float],
        watch: WatchLimits | None = None,
        on_reload: Callable[[], None] | None = None,
    ) -> None:
        """`jitter` gives numbers in 0…1. `on_reload` raises ConfigError to refuse; None refuses always."""
        assert len(plans) == len(page)
        self._watch = watch or WatchLimits()
        self._page = page
        self._listeners = listeners
        self._notifier = notifier
        self._clock = clock
        self._jitter = jitter
        self._on_reload = on_reload
        self._children = [self._wanted(number, plan, plans) for number, plan in enumerate(plans)]
        self._drain: Drain | None = None
        self._exit_code: int = ExitCode.OK
        self._announced_ready = False
        self._status = ""
        self._next_ping_ms = 0
        self._next_extension_ms = 0
        self._wake_planned_ms = 0
        self._judge_from_ms = 0
        self._pid = os.getpid()

    def run(self) -> int:
        """Serves until drained; returns the exit code of the service."""
        gc.collect()
        # What exists now is shared by all children: a collection in a child must not touch (and so copy) it.
        gc.freeze()
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = {number: signal.signal(number, _only_wake) for number in SIGNALS}
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(reader, selectors.EVENT_READ)
                self._serve(selector, reader)
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)
        self._listeners.close_all()
        log.info("drain_finished", exit_code=self._exit_code)
        return self._exit_code

    # --- one round ---

    def _serve(self, selector: selectors.BaseSelector, reader: int) -> None:
        while True:
            now_ms = self._now_ms()
            self._reap(now_ms)
            self._judge_children(now_ms)
            self._fork_due(now_ms)
            self._go_on_draining(now_ms)
            self._tell_manager(now_ms)
            if self._drain is not None and not self._running():
                return
            self._wake_planned_ms = now_ms + self._watch.tick_ms
            if selector.select(self._watch.tick_ms / 1000):
                for number in os.read(reader, 4096):
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        if number in {signal.SIGTERM, signal.SIGINT}:
            self._on_stop_signal(self._now_ms())
        elif number == signal.SIGHUP:
            self._reload()

    def _on_stop_signal(self, now_ms: int) -> None:
        if self._drain is None:
            self._begin_drain(Stage.NOTICE, now_ms)
        elif self._drain.hurry(now_ms=now_ms):
            log.warning("drain_hurried")
            self._tell_stage()

    # --- life and death of a child ---

    def _fork_due(self, now_ms: int) -> None:
        if self._drain is not None:
            return
        for child in self._children:
            if child.due_ms is not None and child.due_ms <= now_ms:
                self._fork(child, now_ms)

    def _fork(self, child: Child, now_ms: int) -> None:
        if not self._has_listener(child):
            child.due_ms = now_ms + self._watch.listener_backoff_ms
            return
        assert_forkable()
        child.generation += 1
        child.measure = Silence.FINE
        child.due_ms = None
        child.record.begin(generation=child.generation, stamp_ns=self._now_ns(), wanted=Stage.NONE)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        child.pid = os.fork()
        if child.pid == 0:
            run_child(child.plan.entry, self._context(child))
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        log.info("child_forked", child=child.plan.name, child_pid=child.pid, generation=child.generation)

    def _has_listener(self, child: Child) -> bool:
        """Binds it again where a long back-off closed it; a port taken meanwhile is not ours to fight for."""
        if child.listener_slot is None:
            return True
        refusal = None
        try:
            self._listeners.open(child.listener_slot)
        except ConfigError as error:
            refusal = str(error)
        if refusal is not None:
            log.error("listener_refused", child=child.plan.name, reason=refusal)
        return refusal is None

    def _context(self, child: Child) -> ChildContext:
        return ChildContext(
            name=child.plan.name,
            number=child.number,
            generation=child.generation,
            record=child.record,
            page=self._page,
            supervisor_pid=self._pid,
            listener=self._listeners.keep_only(child.listener_slot),
        )

    def _reap(self, now_ms: int) -> None:
        for child in self._running():
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._on_death(child, os.waitstatus_to_exitcode(status), now_ms)

    def _on_death(self, child: Child, exit_code: int, now_ms: int) -> None:
        ready_ns = child.record.ready_ns
        ready_for_ms = now_ms - ready_ns // 1_000_000 if ready_ns else 0
        child.record.set_state(ChildState.ENDED, now_ns=0)
        child.pid = 0
        if exit_code == -signal.SIGKILL and child.measure is not Silence.KILL:
            log.error("worker_killed", child=child.plan.name, oom_kills=_oom_kills())
        if self._drain is not None:
            log.info("child_ended", child=child.plan.name, exit_code=exit_code)
            return
        fate = judge_exit(exit_code)
        if fate is Fate.HALT:
            log.error("service_halted", child=child.plan.name, exit_code=exit_code)
            self._exit_code = exit_code
            self._begin_drain(Stage.DOOR, now_ms)
            return
        self._plan_restart(child, exit_code, fate, now_ms=now_ms, ready_for_ms=ready_for_ms)

    def _plan_restart(
        self, child: Child, exit_code: int, fate: Fate, *, now_ms: int, ready_for_ms: int
    ) -> None:
        delay_ms = child.policy.on_death(
            now_ms=now_ms, ready_for_ms=ready_for_ms, fate=fate, jitter=self._jitter()
        )
        child.due_ms = now_ms + delay_ms
        log.error("child_died", child=child.plan.name, exit_code=exit_code, restart_in_ms=delay_ms)
        if fate is Fate.FENCED:
            log.error("child_fenced", child=child.plan.name)
        if child.policy.is_flapping(now_ms):
            log.error("child_flapping", child=child.plan.name, deaths=self._watch.flapping_deaths)
        if child.listener_slot is not None and delay_ms > self._watch.listener_backoff_ms:
            self._listeners.close(child.listener_slot)

    def _judge_children(self, now_ms: int) -> None:
        if self._wake_planned_ms and now_ms - self._wake_planned_ms > self._watch.late_ms:
            log.warning("supervisor_paused", late_ms=now_ms - self._wake_planned_ms)
            # The children were paused too and get as long again to beat.
            self._judge_from_ms = now_ms + self._watch.late_ms
        if now_ms < self._judge_from_ms:
            return
        for child in self._running():
            silent_ms = self._silent_ms(child, now_ms)
            verdict = judge_silence(silent_ms, self._watch)
            if verdict is child.measure or child.measure is Silence.KILL:
                continue
            if verdict is Silence.FINE:
                # Recovered by itself: the next silence is judged anew. One that got SIGABRT ends anyway.
                child.measure = verdict if child.measure is Silence.SLOW else child.measure
                continue
            self._punish(child, verdict, silent_ms)

    def _punish(self, child: Child, verdict: Silence, silent_ms: int) -> None:
        child.measure = verdict
        if verdict is Silence.SLOW:
            log.warning("worker_slow", child=child.plan.name, silent_ms=silent_ms, measure=verdict.value)
            return
        log.error("worker_silent", child=child.plan.name, silent_ms=silent_ms, measure=verdict.value)
        os.kill(child.pid, MEASURES[verdict])

    # --- drain ---

    def _begin_drain(self, first: Stage, now_ms: int) -> None:
        log.info("drain_started")
        self._drain = Drain(now_ms=now_ms, budget_ms=self._watch.drain_ms, first=first)
        for child in self._children:
            child.due_ms = None
        self._notifier.stopping("draining")
        self._notifier.extend_timeout(usec=self._watch.drain_ms * 1000)
        self._tell_stage()

    def _go_on_draining(self, now_ms: int) -> None:
        drain = self._drain
        if drain is None:
            return
        first_out = [child for child in self._running() if not child.plan.ends_last]
        if not first_out and drain.hurry(now_ms=now_ms):
            self._tell_stage()
        slowest = min((child.record.stage_done for child in first_out), default=Stage.CLOSE)
        if drain.advance(now_ms=now_ms, slowest=slowest):
            self._tell_stage()
        if not first_out:
            for child in self._running():
                self._tell_child(child, Stage.CLOSE)
        if drain.is_overdue(now_ms):
            self._kill_rest()

    def _tell_stage(self) -> None:
        assert self._drain is not None
        log.info("drain_stage", stage=self._drain.stage.name.lower())
        if self._drain.stage > Stage.DOOR:
            # Children have accepted what waited; from here on nobody listens.
            self._listeners.close_all()
        for child in self._running():
            if not child.plan.ends_last:
                self._tell_child(child, self._drain.stage)

    def _tell_child(self, child: Child, stage: Stage) -> None:
        if child.record.stage_wanted is not stage:
            child.record.want(stage)
            os.kill(child.pid, signal.SIGTERM)

    def _kill_rest(self) -> None:
        for child in self._running():
            if child.measure is not Silence.KILL:
                log.error("drain_deadline_missed", child=child.plan.name)
                child.measure = Silence.KILL
                os.kill(child.pid, signal.SIGKILL)

    # --- the service manager ---

    def _tell_manager(self, now_ms: int) -> None:
        self._say_status(now_ms)
        period_ms = self._notifier.watchdog_usec // 2000
        if period_ms and now_ms >= self._next_ping_ms:
            self._next_ping_ms = now_ms + period_ms
            if may_ping_watchdog([self._overdue_ms(child, now_ms) for child in self._children], self._watch):
                self._notifier.watchdog()
            else:
                log.error("watchdog_withheld")

    def _say_status(self, now_ms: int) -> None:
        if self._drain is not None:
            return
        status = self._describe()
        all_ready = all(child.record.state is ChildState.READY for child in self._children)
        if all_ready and not self._announced_ready:
            self._announced_ready = True
            log.info("service_ready", port=self._listeners.port)
            self._notifier.ready(status)
        elif status != self._status:
            self._notifier.status(status)
        self._status = status
        if not self._announced_ready and now_ms >= self._next_extension_ms:
            self._next_extension_ms = now_ms + EXTEND_EVERY_MS
            self._notifier.extend_timeout(usec=EXTEND_USEC)

    def _describe(self) -> str:
        states = [(child.plan.name, child.record.state) for child in self._children]
        ready = sum(state is ChildState.READY for _, state in states)
        rest = [f"{name} {state.name.lower()}" for name, state in states if state is not ChildState.READY]
        return "; ".join([f"{ready} of {len(states)} processes ready", *rest])

    def _reload(self) -> None:
        if self._drain is not None:
            return
        self._notifier.reloading(monotonic_usec=self._now_ns() // 1000)
        refusal = self._refusal_to_reload()
        if refusal:
            log.error("config_reload_refused", reason=refusal)
        else:
            log.info("config_reloaded")
            for child in self._running():
                os.kill(child.pid, signal.SIGHUP)
        self._notifier.ready(self._describe())

    def _refusal_to_reload(self) -> str:
        if self._on_reload is None:
            return "nothing can be reloaded here; restart instead"
        try:
            self._on_reload()
        except ConfigError as error:
            return "; ".join(error.problems)
        return ""

    # --- small things ---

    def _wanted(self, number: int, plan: ChildPlan, plans: Sequence[ChildPlan]) -> Child:
        slot = sum(other.listens for other in plans[:number]) if plan.listens else None
        return Child(plan, number, slot, self._page.record(number), RestartPolicy(self._watch))

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.pid]

    def _silent_ms(self, child: Child, now_ms: int) -> int:
        return max(0, now_ms - child.record.stamp_ns // 1_000_000)

    def _overdue_ms(self, child: Child, now_ms: int) -> int:
        """Back-off counts as repair: what is planned is not stuck."""
        if child.pid:
            silent_ms = self._silent_ms(child, now_ms)
            return silent_ms if silent_ms >= self._watch.slow_ms else 0
        return 0 if child.due_ms is None else max(0, now_ms - child.due_ms)

    def _now_ns(self) -> int:
        return int(self._clock.monotonic() * 1_000_000_000)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1_000)


def _only_wake(_number: int, _frame: object) -> None:
    """The number is in the wake-up pipe already."""


def _oom_kills() -> int:
    """How often the kernel killed for lack of memory in our cgroup; 0 where that cannot be read."""
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("::")[2].strip()
        events = Path(f"/sys/fs/cgroup{group}/memory.events").read_text(encoding="ascii")
    except OSError:
        return 0
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))
