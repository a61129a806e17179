"""Code shared by the scripts of published results: command line, claims of papers, verification."""
