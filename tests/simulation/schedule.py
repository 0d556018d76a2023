"""What a seed means: who is there, who says what when, and what goes wrong.

A plan is drawn completely before anything runs, from one `random.Random(seed)`; a second one, seeded from it,
draws the delays and the dice of the run. So a plan can be printed, and one seed is one run, bit by bit.

Schedules are short on purpose (tens of messages, a few seconds of virtual time, a handful of faults): a
violation needs two or three coincidences, and many small worlds meet more of them per minute than one large.
"""

from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from qim.client.sync import HELD_SECONDS
from qim.ids import TenantId
from tests.simulation.faults import Rates

TENANT: Final = TenantId(7)
DAY_MS: Final = 86_400_000
START_MS: Final = 1_700_000_000_000 // DAY_MS * DAY_MS
TOPOLOGIES: Final = ("together", "together", "apart", "instances")
"""One server for everything, one per role, or two instances of core and mailbox and a log of their own."""

WORKER_FAULTS: Final = ("kill", "kill", "usurp", "usurp", "pause", "drain")
STORE_FAULTS: Final = ("cut_pipe", "cut_pipe", "stop_server", "crash_server")
CLIENT_FAULTS: Final = ("cut_client", "cut_client", "half_open", "kill_device", "no_network")
LINK_FAULTS: Final = ("cut_link",)

MOMENTS: Final = ("taking", "dispatching", "noting", "delivering")
FATES: Final = ("lost", "under way", "refused")
"""Calls in which a worker may be killed, and what becomes of the call: `moments.py`."""


class Act(NamedTuple):
    """What a device does."""

    at: float
    what: str
    """send, burst, read, history"""
    device: int
    peer: int
    """User."""
    times: int


class Strike(NamedTuple):
    """A fault and how long it lasts."""

    at: float
    what: str
    target: int
    seconds: float
    amid: str = ""
    """Of a kill that waits for its moment (`moments.py`): the kind of call in which the process dies,"""
    fate: str = ""
    """what becomes of the call,"""
    after: float = 0.0
    """and how long after its begin, in longest delays of the stores."""


class Plan(NamedTuple):
    """One schedule."""

    seed: int
    workers: int
    topology: str
    one_step: bool
    """Whether reserve, append and commit are one call where one server holds both."""
    users: int
    devices: tuple[int, ...]
    """User of each device."""
    start_ms: int
    wrong_clocks_ms: tuple[int, ...]
    """Per worker."""
    acts: tuple[Act, ...]
    strikes: tuple[Strike, ...]
    rates: Rates
    commit_failures: float
    client_delay: float
    slice_share: float
    held_seconds: float
    """How long devices hold pushes before a page confirms them; 10 in the SDK."""
    seconds: float
    run_seed: int

    @property
    def sends(self) -> int:
        return sum(act.times for act in self.acts if act.what in {"send", "burst"})


def draw_plan(seed: int) -> Plan:
    rng = Random(seed)
    workers = rng.choice((1, 1, 2, 2, 3))
    users = rng.randint(2, 4)
    devices = tuple(range(users)) + ((rng.randrange(users),) if rng.random() < 0.6 else ())
    seconds = rng.choice((1.5, 3.0, 6.0))
    topology = rng.choice(TOPOLOGIES)
    return Plan(
        seed=seed, workers=workers, topology=topology,
        one_step=topology == "together" and rng.random() < 0.6,
        users=users, devices=devices,
        # A quarter of the runs crosses midnight: the day of the shards turns under way.
        start_ms=START_MS + (DAY_MS - rng.randint(0, 4_000) if rng.random() < 0.25 else 36_000_000),
        wrong_clocks_ms=tuple(_draw_wrong_clock(rng) for _ in range(workers)),
        acts=_draw_acts(rng, users, devices, seconds),
        strikes=_aim(Random(f"aims of {seed}"), _draw_strikes(rng, workers, devices, seconds)),
        rates=_draw_rates(rng), commit_failures=rng.choice((0.0, 0.0, 0.0, 0.02)),
        client_delay=rng.choice((0.002, 0.01, 0.05)), slice_share=rng.choice((0.0, 0.0, 0.1)),
        seconds=seconds, run_seed=rng.getrandbits(64),
        # Mostly sooner than the SDK would: pages then meet the faults, and the end is not spent on waiting.
        held_seconds=rng.choice((0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, HELD_SECONDS)),
    )  # fmt: skip


def _draw_wrong_clock(rng: Random) -> int:
    return 0 if rng.random() < 0.7 else rng.randint(-2_000, 2_000)


def _draw_acts(rng: Random, users: int, devices: Sequence[int], seconds: float) -> tuple[Act, ...]:
    acts = []
    # Few conversations with many messages, or many with few.
    pairs = [(one, other) for one in range(users) for other in range(users) if one != other]
    chosen = rng.sample(pairs, min(len(pairs), rng.choice((1, 2, 4))))
    for _ in range(rng.randint(6, 24)):
        user, peer = rng.choice(chosen)
        device = rng.choice([at for at, owner in enumerate(devices) if owner == user])
        what = rng.choices(("send", "burst", "read", "history"), (70, 10, 10, 10))[0]
        acts.append(
            Act(rng.uniform(0.0, seconds), what, device, peer, rng.randint(2, 8) if what == "burst" else 1)
        )
    return tuple(sorted(acts))


def _draw_strikes(rng: Random, workers: int, devices: Sequence[int], seconds: float) -> tuple[Strike, ...]:
    kinds = [*WORKER_FAULTS, *STORE_FAULTS, *CLIENT_FAULTS, *(LINK_FAULTS if workers > 1 else ())]
    strikes = []
    for _ in range(rng.randint(0, 5)):
        what = rng.choice(kinds)
        target = rng.randrange(len(devices) if what in CLIENT_FAULTS else workers)
        lasting = rng.choice((0.05, 0.3, 1.0, 3.0))
        if what in {"stop_server", "pause"} and rng.random() < 0.2:
            lasting = 7.0  # longer than a command may take
        strikes.append(Strike(rng.uniform(0.0, seconds), what, target, lasting * rng.uniform(0.5, 1.5)))
    return tuple(sorted(strikes))


def _aim(rng: Random, strikes: Sequence[Strike]) -> tuple[Strike, ...]:
    """Half of the kills wait for a moment; the chance is one of its own, so all else of a plan stays."""
    aimed = []
    for one in strikes:
        if one.what == "kill" and rng.random() < 0.5:
            amid, fate = rng.choice(MOMENTS), rng.choice(FATES)
            after = 0.0 if fate == "lost" else rng.uniform(0.1, 4.0)
            aimed.append(one._replace(what="kill_amid", amid=amid, fate=fate, after=after))
        else:
            aimed.append(one)
    return tuple(aimed)


def _draw_rates(rng: Random) -> Rates:
    share = rng.choice((0.0, 0.0, 0.01, 0.05))
    slow = rng.choice((0.001, 0.001, 0.005, 0.03))
    return Rates(
        refused=share * rng.random(), unanswered=share * rng.random(), twice=share * rng.random(),
        partly=share * rng.random(), delay_min=slow / 10, delay_max=slow,
    )  # fmt: skip
