"""The client protocol without input or output: bytes in, typed events out, bytes out.

Server, client, load generator, simulation and browser vectors share this one codec, so a limit or a field has
one meaning. Nothing here knows a socket, a clock or a store.
"""
