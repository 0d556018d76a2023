"""The operator side: tuning profiles, the control protocol and the commands of `qimctl`.

Commands return plain dictionaries and leave it to one renderer to make a table or JSON of them. A command
talks to a running server through its control socket; it never opens a store behind the back of the process
that owns it.
"""
