"""Load on a server or an engine, and what it measured. Knows no torch and no ray; `bench_cli.py` prints it."""
