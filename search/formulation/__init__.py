"""The choice of a program as a weighted constraint problem, and back."""
