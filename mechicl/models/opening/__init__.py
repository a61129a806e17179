"""The engine that runs, resumes, records and edits any model with hooks."""
