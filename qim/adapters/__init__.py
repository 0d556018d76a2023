"""One file per port and medium: the only code that speaks to a store.

An adapter keeps the promise that its port states in words, and reports an error or a time-out as *unknown*,
never as *no*. What several adapters of one medium share starts with the name of the medium. The memory twins
are real adapters, held to the same contract suites.
"""
