"""Field cases: problems that operators of other messaging systems met, played on a whole service.

Each case is scaled to a small machine. The numbers that were used, and what was found, are printed as a
table (`pytest -s`) and stored in the report of the test (`--junit-xml`), so that nobody has to guess them.
"""
