"""All tests, one folder per layer; `conftest.py` says which services a layer may start.

A test that proves a guarantee or a fault row carries its id in a `shows` mark, and the run ends with a table
of ids and proofs.
"""
