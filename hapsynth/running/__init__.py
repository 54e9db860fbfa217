"""All that a plan needs to run: arguments, storage, transfers, plan files, checks."""
