"""Every "Must show" line of the issues, at full counts: `make prove`, or `make prove ARGS="1.4 1.5"` for some."""
