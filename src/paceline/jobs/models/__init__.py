"""Models of the papers, and two small models."""
