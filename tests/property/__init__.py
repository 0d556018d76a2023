"""Hypothesis tests: properties that hold for every input rather than for chosen ones.

A failure prints the smallest input that shows it; that input becomes a named test beside the fix.
"""
