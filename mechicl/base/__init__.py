"""Plumbing that every other package uses: argument checks, files and locks, memory bounds, progress bars, threads."""
