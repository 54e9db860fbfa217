"""The command line's output: tables, JSON documents, progress and error lines."""
