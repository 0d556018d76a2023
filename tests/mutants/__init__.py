"""The code broken on purpose, one place at a time, to see that the tests notice.

A guarantee is worth what its test is worth, and a test that passes whatever the code does is worth nothing.
Each mutant here is one small change that breaks a promise, with the ids of the promises that it breaks and
the cheapest tests that must turn red. `python -m tests.mutants` proves them on copies of the tree, with
`--long` the slow ones too.

    model.py        what a mutant is, how it is applied, what counts as caught
    catalogue.py    all of them, by id; the ids that no mutant can break, each with its reason
    of_*.py         the mutants themselves, by the part of the code that they break
    tree.py         copies of the project to break
    witness.py      the pytest plugin inside a copy: what failed, what it shows, and where the code came from
    runner.py       control run, mutants side by side, table
"""
