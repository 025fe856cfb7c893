"""Scripted attacks on the sandbox, the grade and the host, which run as real trials. For the options, see
`python -m tests.security.red_team --help`.
"""
