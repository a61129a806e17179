"""Plumbing that every other package uses: settings, argument checks, files and locks, progress bars, threads."""
