"""The parts of `make bench`: each measures the library beside what one would otherwise run."""
