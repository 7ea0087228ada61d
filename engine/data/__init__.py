"""Data: orders that are functions, random numbers that are functions, loaders that start anywhere."""
