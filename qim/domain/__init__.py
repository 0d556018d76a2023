"""Pure decisions: each role of `workers` has a twin here that decides and does nothing else.

Time, ids and randomness come in as arguments. A rule can therefore be tested with a table of inputs, and a
whole run of the server can be repeated from a seed.
"""
