"""A table of attacks on the sandbox, the grade and the host, played as real trials. `python -m tests.security.red_team --help`."""
