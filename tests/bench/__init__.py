"""Measurements, off by default: `pytest -m bench tests/bench -s` prints them.

They compare one version of the code with the next on the same quiet machine; they assert nothing about speed.
"""
