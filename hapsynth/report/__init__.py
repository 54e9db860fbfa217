"""What a person sees: the command line's tables, JSON documents, progress and error lines."""
