"""The command line: one file a subcommand, which turns arguments into settings and calls the library."""
