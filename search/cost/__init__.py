"""Seconds: of ops on devices, of collectives on links, of a program."""
