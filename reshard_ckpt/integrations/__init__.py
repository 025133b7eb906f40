"""Frameworks that save and load through this library; each is imported by itself, and only where it is used."""
