"""Tests of adapters that need no real server, or only one to talk to."""
