"""Fault rows: each strikes one fault on a whole service, proves that it struck, and judges from outside.

What is judged is what clients were told: every acknowledgement asked for again gets the same coordinates,
history and both mailboxes hold each message once, and the audit of the raw keys is clean.
"""
