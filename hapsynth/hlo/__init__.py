"""What XLA made of a program, read from the text of its compiled module."""
