"""Texts to classify: tables of data sets, a rule-made world of topics, and prompts with demonstrations."""
