"""A distributed program: instructions, sizes, checker."""
