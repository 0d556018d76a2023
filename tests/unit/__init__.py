"""Tests of single modules, without services: mirrors `qim/` and `workers/`.

They run in a fraction of a second each, so that a rule can be changed and checked while it is being thought
about.
"""
