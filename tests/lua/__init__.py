"""One file per Lua script, on real servers with a random key prefix.

Every script runs on the embedded Valkey and on the Redis of Debian and must behave the same on both.
"""
