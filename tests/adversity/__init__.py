"""Real services behind something that cuts, delays or half-closes their connections.

A fault test shows by a counter that its fault really happened; without that a green result means nothing.
"""
