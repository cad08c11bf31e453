"""Utilities without knowledge of training: validation, parsing, random streams, files, tables, messages."""
