"""What the scripts of published results share: their command line, claims of papers, and how results are verified."""
