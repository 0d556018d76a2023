"""What each fault of a plan does to a world, and how it ends.

Every fault that strikes is written into the history and counted: a run shows what happened to it. A fault
that finds nothing to strike (a worker that is down already, a device without a connection) does nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tests.simulation.faults import Server
from tests.simulation.host import Host
from tests.simulation.moments import KillAmid
from tests.simulation.network import NEVER, End
from tests.simulation.schedule import Strike

if TYPE_CHECKING:
    from tests.simulation.world import World


def strike(world: "World", one: Strike) -> None:
    """Called at the planned moment."""
    target = STRIKES[one.what](world, one)
    if target:
        _note(world, one, target)


def _note(world: "World", one: Strike, target: str) -> None:
    world.struck[one.what] = world.struck.get(one.what, 0) + 1
    world.note("world", f"{one.what} strikes {target} for {one.seconds:.3f} s")
    world.book.fault(one.what, target)


def _host(world: "World", one: Strike) -> Host | None:
    host = world.hosts[one.target]
    return host if host is not None and not host.has_ended and not host.process.is_paused else None


# --- owners ------------------------------------------------------------------------------------------


def _kill(world: "World", one: Strike) -> str:
    host = _host(world, one)
    if host is None:
        return ""
    world.end_worker(host)
    world.hosts[one.target] = None
    world.loop.call_later(one.seconds / 4, world.start_worker, one.target)
    return host.process.name


def _kill_amid(world: "World", one: Strike) -> str:
    KillAmid(world, one, _note)
    return ""  # not yet: it strikes when its moment has come


def _pause(world: "World", one: Strike) -> str:
    host = _host(world, one)
    if host is None:
        return ""
    world.loop.pause(host.process)
    world.loop.call_later(one.seconds, _resume, world, host)
    return host.process.name


def _usurp(world: "World", one: Strike) -> str:
    """It stands still, another boot takes its slots, then it goes on as if nothing had happened."""
    host = _host(world, one)
    if host is None or not host.is_serving:
        return ""
    world.loop.pause(host.process)
    world.retired.append(host)
    world.hosts[one.target] = None
    world.loop.call_later(one.seconds / 8, world.start_worker, one.target)
    world.loop.call_later(one.seconds, _resume, world, host)
    return host.process.name


def _resume(world: "World", host: Host) -> None:
    if host.process.is_paused and host.process.is_alive:
        world.note(host.process.name, "goes on")
        world.loop.resume(host.process)


def _drain(world: "World", one: Strike) -> str:
    host = _host(world, one)
    if host is None or not host.is_serving:
        return ""
    world.loop.spawn(host.process, host.drain(), name="drain")
    return host.process.name


# --- stores ------------------------------------------------------------------------------------------


def _cut_pipe(world: "World", one: Strike) -> str:
    host = _host(world, one)
    if host is None:
        return ""
    pipe = world.rng.choice(list(host.stores.pipes.values()))
    late_by = world.rng.choice((0.0, 0.02, one.seconds))
    pipe.cut(executed=world.rng.randint(0, 6), late_by=late_by, back_after=one.seconds / 3)
    return host.process.name


def _server(world: "World", one: Strike) -> Server:
    servers = world.servers.all
    return servers[one.target % len(servers)]


def _stop_server(world: "World", one: Strike) -> str:
    server = _server(world, one)
    server.stopped_until = world.loop.time() + one.seconds
    for moment in range(1, int(one.seconds) + 1):
        world.loop.call_later(moment, _look_at_clocks, server)
    return server.name


def _look_at_clocks(server: Server) -> None:
    for pipe in server.pipes:
        pipe.look_at_clock()


def _crash_server(world: "World", one: Strike) -> str:
    server = _server(world, one)
    server.down_until = world.loop.time() + one.seconds
    for pipe in server.pipes:
        if pipe.is_connected:
            pipe.cut(executed=world.rng.randint(0, 6), late_by=0.0, back_after=one.seconds)
    return server.name


# --- devices and links -------------------------------------------------------------------------------


def _open_end(world: "World", one: Strike) -> End | None:
    process = world.devices[one.target].process
    ends = world.net.open_ends(process) if process is not None else []
    return ends[-1] if ends else None


def _cut_client(world: "World", one: Strike) -> str:
    end = _open_end(world, one)
    if end is None:
        return ""
    late = world.rng.choice((0.0, 0.01, one.seconds))
    world.net.cut(end, told_after=world.rng.uniform(0, 0.02), peer_told_after=late)
    return end.process.name


def _half_open(world: "World", one: Strike) -> str:
    """One end does not hear of it: its own silence rules must notice."""
    end = _open_end(world, one)
    if end is None:
        return ""
    mine, theirs = world.rng.choice(((0.0, NEVER), (NEVER, 0.0), (NEVER, NEVER)))
    world.net.cut(end, told_after=mine, peer_told_after=theirs)
    return end.process.name


def _kill_device(world: "World", one: Strike) -> str:
    device = world.devices[one.target]
    if device.process is None:
        return ""
    name = device.process.name
    world.kill_device(device)
    world.loop.call_later(one.seconds / 2, _start_again, world, one.target)
    return name


def _start_again(world: "World", number: int) -> None:
    device = world.devices[number]
    if device.process is None:
        world.start_device(device)


def _no_network(world: "World", one: Strike) -> str:
    target = _cut_client(world, one)
    if target:
        world.net.unreachable.add(target)
        world.loop.call_later(one.seconds, world.net.unreachable.discard, target)
    return target


def _cut_link(world: "World", one: Strike) -> str:
    host = _host(world, one)
    ends = world.net.open_ends(host.process) if host is not None else []
    links = [end for end in ends if end.peer is not None and end.peer.process.name.startswith("worker")]
    if not links:
        return ""
    world.net.cut(world.rng.choice(links), told_after=0.0, peer_told_after=world.rng.uniform(0, 0.1))
    return links[0].process.name


STRIKES: Final[dict[str, Callable[["World", Strike], str]]] = {
    "kill": _kill, "kill_amid": _kill_amid, "pause": _pause, "usurp": _usurp, "drain": _drain,
    "cut_pipe": _cut_pipe, "stop_server": _stop_server, "crash_server": _crash_server,
    "cut_client": _cut_client, "half_open": _half_open, "kill_device": _kill_device,
    "no_network": _no_network, "cut_link": _cut_link,
}  # fmt: skip
