"""What can be run: each module has a `run(config, ...)` and a command."""
