"""Limits: every queue has a bound, its bound a reason, and a test that fills it.

`table.py` lists them all, `holders.py` finds the collections in the code, `test_table.py` holds the two
against each other; the other tests fill what no unit test of a role fills with its real bound.
"""
