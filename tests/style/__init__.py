"""The house rules as tests: who imports whom, sizes, docstrings, names, banned calls.

A rule nobody checks is a wish. A breach that is right carries its reason beside the suppression.
"""
