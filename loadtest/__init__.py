"""Load generators and their report: `capacity` finds the server's limit, `locustfile` plays many people.

Both speak through the real codec and count loss and doubles by themselves, so a number is never quoted
without its correctness. A generator that was too busy to be believed says so, and so does a machine that
was.
"""
