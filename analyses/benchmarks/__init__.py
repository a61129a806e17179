"""The parts of `make bench`; each compares the library with its alternatives."""
