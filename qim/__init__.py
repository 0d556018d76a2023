"""qim: the library behind the server, the client and the tools.

Everything that decides, speaks the protocol or touches a store lives here; the processes that use it live in
`workers`, which this package never imports. So the client, the load generator and the simulation can use the
very rules the server runs on, without starting a server.
"""
