"""Tests of the client protocol: golden bytes, broken bytes, and a linked pair of connections.

The same vectors are meant for every other codec of the protocol, so a test here never builds its own expected
bytes.
"""
