"""The launcher: the whole run on one machine, and the `headrace` command."""
