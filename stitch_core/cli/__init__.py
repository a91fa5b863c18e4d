"""The ``stitch`` command. One module a subcommand; each adds its parser and runs it."""
