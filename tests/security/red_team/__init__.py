"""Scripted attacks on the sandbox, the grade and the host, run as real trials. See `python -m
tests.security.red_team --help`.
"""
