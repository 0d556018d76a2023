"""The client SDK: a core without input or output, a local SQLite store and thin transports around them.

The mailbox on the server is the truth and a push is a hint; the core turns gaps, lost answers and reconnects
into pulls and repeats with the same client message id, so that an application sees every message once and in
order.
"""
