"""The `quantkit` command: one file per subcommand, joined in `main`."""
