"""The seeded simulation: writer, fan-out, mailbox, presence, gateway, links and the SDK on one loop of
virtual time, with stores and networks that delay, lose, repeat and break; the history checker judges runs.

    make simulate SEEDS=2000                             many schedules, all CPUs, with a progress bar
    python -m tests.simulation --seeds 2000 --json       the same for a machine
    python -m tests.simulation --seed 17 --replay        one schedule with its whole trace, the same each time
    python -m tests.simulation --mutant epoch-not-checked --until-failure

A seed is a plan (`schedule.py`) and a source of chance for everything else. The real classes run: `Roles`
with its gateway, router and links, `Claims`, and the SDK's engine on SQLite in memory. Replaced are the loop
(`loop.py`), sockets (`network.py`), the connections to stores (`faults.py`, in front of the memory adapters),
the writer thread of the local store and the tokens (`device.py`, `host.py`). A process is killed between two
callbacks and nothing of it runs any more; a stopped one goes on later, with an old epoch.

`world.py` runs a plan and `strikes.py` its faults; half of the kills wait for a call to a store and strike in
its middle (`moments.py`). After the last fault everything heals, must become quiet within a bounded time, and
is read once more (`dump.py`). A failure names seed and commit; replayed, its trace is the same byte for byte,
whatever PYTHONHASHSEED says. What it shows becomes a named test where it belongs.

What the simulation does not have: TLS, the kernel, the Lua scripts and a real disk; other layers have those.
`mutants.py` breaks the program on purpose: each of its mutants must be found.
"""
