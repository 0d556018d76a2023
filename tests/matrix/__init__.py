"""The media matrix: may a medium carry tasks after an ACK? One experiment per way to lose or double them.

A medium is an entry of `media.MEDIA`, an experiment a function of `experiments.EXPERIMENTS`. Every experiment
is written against the ports (`qim.ports.CommitLog` and the stores beside it) and against the roles, never
against a medium; what a medium alone can do (start, die, lose power) is its `Host`. Each experiment ends in
an `Outcome`: what was counted, how often its fault really struck, and every sentence that contradicts the
promise.

`python -m tests.matrix [--json] [E1 …] [--tasks N]` prints the table. Its exit code is 0 when every medium
does what its class claims: it passes what it claims to pass, and fails what it says it fails. A medium that
passes by surprise is reported as well, because then either the claim or the experiment is wrong.
"""
