"""Tests of the operator's tool without a server: what it asks, what it prints, how it ends.

Whether a real server answers as these tests pretend is shown in `tests/process`.
"""
